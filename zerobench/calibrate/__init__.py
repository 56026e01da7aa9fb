"""Measurements of the machine itself: collectives by size."""
