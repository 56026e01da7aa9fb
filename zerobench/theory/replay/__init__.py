"""The replay: a second implementation of the engine's schedule, played event by event on a model's shapes alone.

It is written apart from `zero/`, from the documents, and knows when each strategy allocates, sends and frees. Played
with the order of events that a run really had, it says to the byte and to the element what the run must have measured.
Equality proves that engine, instrument and replay agree on the schedule; it does not prove the paper's formula, which
has no schedule. The closed forms stand beside the replay, in states.py and volume.py, and bound the same measurement.

Entries: `states.predict_states`, `traffic.predict_traffic`, `link_traffic.predict_links`.
"""
