"""What the formulas say, from a model's shapes alone. Knows nothing of engines, probes or torch."""
