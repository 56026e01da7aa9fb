"""The reason why a published run has no estimate."""

from __future__ import annotations


class NotGivenError(Exception):
    """The configuration of a run is not given, or is none that is executed here; the message says what, in words."""
