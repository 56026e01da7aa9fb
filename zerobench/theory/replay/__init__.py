"""The schedules played event by event: a second implementation of the engine's order, not the paper's formulas."""
