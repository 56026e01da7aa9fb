"""The replay: a second implementation of the engine's schedule, played event by event on a model's shapes alone.

It is written from the documents, independently of `zero/`, and models when each strategy allocates, sends and frees.
Given the order of events of a real run, it predicts that run's measurements to the byte and to the element.
Equality proves that engine, measurement and replay agree on the schedule; it does not prove the paper's formula, which
has no schedule. The closed forms are in closed_forms.py. The replay adds what is in flight:

    gradients of autograd    the gradient being handed over, and those made together with it
    open units               from a unit's first gradient to its last, and the previous unit, which is sent meanwhile
    units in use             ZeRO-3: the root, one unit with the units around and inside it, and prefetched units
    received                 receive buffers of a reduction
    tile of an update        fp32 gradients of the segments that are updated together
    the rest                 padding to multiples of 64 bytes, an optimizer's counts, minus states that no step has made

Entries: `states.predict_states`, `traffic.predict_traffic`, `traffic.predict_links`.
"""
