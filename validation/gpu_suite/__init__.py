"""The GPU suite: its sections, in the order of their value to a run that is cut short.

suite.py     a section, the way through the sections against the clock, and the results
probe.py training.py bus.py tiers.py largest.py: the sections
"""

from __future__ import annotations

from .bus import BUS
from .largest import LARGEST
from .probe import PROBE
from .suite import SuiteSection
from .tiers import TIERS
from .training import MEMORY, PARITY, SPEED

SECTIONS: dict[str, SuiteSection] = {one.name: one for one in (PROBE, PARITY, SPEED, MEMORY, BUS, TIERS, LARGEST)}
