"""Runs cells: the life of one, a sweep of many, a search, the rows of the ranks joined to one, progress."""
