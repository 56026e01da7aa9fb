"""Cells without ranks: simulated on fake tensors in this process, and their steps timed on a described cluster.

Sweeps and commands import it. execute.py runs a rank; costs.py, timeline.py and prediction.py make its events a time.
"""
