"""Verdicts on measured figures, which the verbs budget, compare and report and the gate of tests share."""
