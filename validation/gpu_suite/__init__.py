"""The GPU suite: its sections, in the order of their value to a run that is cut short.

suite.py     a section, the way through the sections against the clock, and the results
update.py engine.py training.py peaks.py tiers.py profile.py: the sections
"""

from __future__ import annotations

from .engine import ENGINE
from .peaks import PEAKS
from .profile import PROFILE
from .suite import SuiteSection
from .tiers import TIERS
from .training import MEMORY, PARITY, SPEED
from .update import OPERATIONS, UPDATE

SECTIONS: dict[str, SuiteSection] = {
    one.name: one for one in (OPERATIONS, UPDATE, ENGINE, PROFILE, PEAKS, SPEED, MEMORY, TIERS, PARITY)
}
