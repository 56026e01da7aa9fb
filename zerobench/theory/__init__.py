"""Predictions from a model's shapes alone: closed forms, terms in flight, and a replay of the schedule.

Everything may import it; it shares no code with the engine.
"""
