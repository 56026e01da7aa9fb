"""Published figures of the ZeRO literature that cells reproduce: formula, executed value and printed value of each."""

from .base import SOURCES
from .reproduce import Reproduced, reproduce
from .row import Row

__all__ = ["SOURCES", "Reproduced", "Row", "reproduce"]
