"""The replay: a second implementation of the engine's schedule, played event by event on a model's shapes alone.

It is written apart from `zero/`, from the documents, and knows when each strategy allocates, sends and frees. Played
with the order of events that a run really had, it says to the byte and to the element what the run must have measured.
Equality proves that engine, instrument and replay agree on the schedule; it does not prove the paper's formula, which
has no schedule. The closed forms are in closed_forms.py. What the replay has beyond them is in flight:

    gradients of autograd    the one that is handed over, with the one that is made beside it
    open units               from a unit's first gradient to its last, and the unit before it, which is sent meanwhile
    units in use             ZeRO-3: the root, one unit with those around and inside of it, and those prefetched
    received                 what a reduction receives into
    tile of an update        gradients in fp32 of what is updated together
    the rest                 padding to multiples of 64 bytes, an optimizer's counts, less states that no step has made

Entries: `states.predict_states`, `traffic.predict_traffic`, `link_traffic.predict_links`.
"""
