"""Runs cells: a single run, a sweep, a search, aggregation of the ranks' records to one row, and progress.

Watches, budgets and commands import it.
"""
