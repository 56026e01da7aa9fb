"""Two passes, one face. The timed pass carries a clock and nothing else; the accounted pass the ledger and the
traffic meter. Both sit beneath every strategy and ask none of them anything.
"""

from __future__ import annotations

from .accounted import AccountedPass
from .clock import TimedPass

PASSES: dict[str, type[TimedPass] | type[AccountedPass]] = {"timed": TimedPass, "accounted": AccountedPass}

__all__ = ["PASSES", "AccountedPass", "TimedPass"]
