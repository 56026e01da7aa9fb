"""The blind test: cells are drawn by a seed, predicted, and committed before the runs that they predict."""
