"""The GPU suite: its sections, in the order of their value to a run that is cut short.

suite.py     a section, the way through the sections against the clock, and the results
update.py    operations of an update, each alone, and the update of a 1.5B model
engine.py    the engine's own tests
cells.py     the sections that are cells of the harness
"""

from __future__ import annotations

from .cells import MEMORY, PARITY, PEAKS, SPEED, TIERS
from .engine import ENGINE
from .suite import SuiteSection
from .update import OPERATIONS, UPDATE

SECTIONS: dict[str, SuiteSection] = {
    section.name: section for section in (OPERATIONS, UPDATE, ENGINE, PEAKS, SPEED, MEMORY, TIERS, PARITY)
}
