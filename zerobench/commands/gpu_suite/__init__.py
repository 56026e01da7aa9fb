"""The GPU suite: what `zerobench gpu-suite` asks of a machine, in the order in which a cut run should have answers.

gpu_suite/section.py   what a section is        run.py      through the sections, against the clock
gpu_suite/probe.py parity.py gpu_suite/speed.py memory.py gpu_suite/bus.py tiers.py gpu_suite/largest.py: a section each
gpu_suite/card.py      what nvidia-smi says     gpu_suite/record.py   what is kept as it goes
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
