"""Peak and traffic of cells before any run: executed on fake tensors, side by side (zerobench/fake_execution)."""
