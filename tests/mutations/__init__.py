"""Faults that are planted in a copy of the project, one at a time, and the tests that catch each: `make mutants`."""
