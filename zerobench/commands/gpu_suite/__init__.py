"""The GPU suite: the sections of `zerobench gpu-suite`, in the order of their value to a run that is cut short.

gpu_suite/section.py   the definition of a section    run.py      through the sections, against the clock
gpu_suite/probe.py parity.py gpu_suite/speed.py memory.py gpu_suite/bus.py tiers.py gpu_suite/largest.py: a section each
gpu_suite/card.py      nvidia-smi's data              gpu_suite/record.py   results, kept as they come
gpu_suite/collectives.py   torch's and ours, checked by value
"""

from __future__ import annotations

from .bus import BUS
from .largest import LARGEST
from .memory import MEMORY
from .parity import PARITY
from .probe import PROBE
from .section import Section
from .speed import SPEED
from .tiers import TIERS

SECTIONS: dict[str, Section] = {one.name: one for one in (PROBE, PARITY, SPEED, MEMORY, BUS, TIERS, LARGEST)}
