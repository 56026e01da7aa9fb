"""zerobench."""
