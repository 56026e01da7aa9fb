"""The GPU suite: its sections, in the order of their value to a run that is cut short.

section.py   the definition of a section           suite.py     through the sections, against the clock; the results
probe.py parity.py speed.py memory.py bus.py tiers.py largest.py: a section each
"""

from __future__ import annotations

from .bus import BUS
from .largest import LARGEST
from .memory import MEMORY
from .parity import PARITY
from .probe import PROBE
from .section import SuiteSection
from .speed import SPEED
from .tiers import TIERS

SECTIONS: dict[str, SuiteSection] = {one.name: one for one in (PROBE, PARITY, SPEED, MEMORY, BUS, TIERS, LARGEST)}
