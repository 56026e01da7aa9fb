"""Predictions for a cell without a run: its model on the meta device, its bytes, its arithmetic.

Ranks, simulations, sweeps and commands import it.
"""
