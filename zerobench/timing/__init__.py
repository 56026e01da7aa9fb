"""Predicted time of a step before there is a run: a cell's simulated schedule on a described device and cluster."""
