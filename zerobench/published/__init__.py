"""Published figures of the ZeRO literature that cells reproduce: formula, executed value and printed value of each."""

from .reproduce import Reproduced, reproduce
from .row import Row
from .sources import SOURCES

__all__ = ["SOURCES", "Reproduced", "Row", "reproduce"]
