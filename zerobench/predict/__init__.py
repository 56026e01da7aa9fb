"""Predictions of a cell's needs without a run: its model built without memory, its bytes, its arithmetic."""
