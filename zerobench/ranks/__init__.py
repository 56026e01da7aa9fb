"""Rank processes: forked for each pass and supervised until they end, on this machine or over a job.

Simulations, sweeps, watches, budgets and commands import it. A rank runs worker.py, or collectives.py to calibrate.
"""
