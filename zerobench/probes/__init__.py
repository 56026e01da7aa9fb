"""Three passes, one face. The timed pass carries a clock and nothing else; the accounted pass the ledger and the
traffic meter; the traced pass, where it is asked for, a profiler. All sit beneath every strategy and ask none of them
anything.
"""

from __future__ import annotations

from .accounted import AccountedPass
from .clock import TimedPass
from .traced import TracedPass

PASSES: dict[str, type[TimedPass] | type[AccountedPass]] = {
    "timed": TimedPass,
    "accounted": AccountedPass,
    "traced": TracedPass,
}

__all__ = ["PASSES", "AccountedPass", "TimedPass", "TracedPass"]
