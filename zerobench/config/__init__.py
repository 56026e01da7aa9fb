"""A command line becomes cells: schemas, checked overrides, composition, and the axes of a resolved config."""
