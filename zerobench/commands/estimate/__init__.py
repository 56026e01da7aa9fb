"""Peak and traffic of cells before any run: simulated on fake tensors, side by side (zerobench/fake_execution)."""
