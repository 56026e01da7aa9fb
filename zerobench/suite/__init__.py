"""The GPU suite: what `zerobench gpu-suite` asks of a machine, in the order in which a cut run should have answers.

section.py   what a section is        run.py      through the sections, against the clock
probe.py parity.py speed.py memory.py bus.py tiers.py largest.py: a section each
card.py      what nvidia-smi says     record.py   what is kept as it goes
collectives.py   torch's and ours, checked by value
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
