"""ZeRO-1 whose gradients leave the device as they are reduced (ZeRO-Offload, offload/cpu.py and offload/nvme.py).

Nothing of them stays, so of whole ones there is a bucket at a time, as in stage 2: what is left of stage 1 is its name,
by which people ask for it, and that the rows of the paper's table 1 are of it.
"""

from __future__ import annotations

from .stage2 import Stage2


class StreamedStage1(Stage2):
    """Stage 1 with gradients that stream."""

    stage = 1
