"""Predictions from a model's shapes alone: closed forms, terms in flight, and a replay of the schedule."""
