"""Where ranks wait for one another: found from what each has launched, and said in one sentence.

[Note: a circle of waiting ranks]
A rank *lacks* a collective that another one waits for if it has launched that channel fewer times. A rank that lacks it
and computes, or writes a file for minutes, is slow: nothing is wrong. Where it waits itself, for a collective that one
of the first lacks, neither will ever go on. So

    a fault := a set of ranks that all wait, each of them for a collective that another one of the set lacks

Counts only grow, and a rank that waits launches nothing. So positions that were published at different times, or are
out of date, show no circle that is not there: the first rank to leave it would have needed another one to leave before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

RULE = (
    "every rank must make the same calls of the engine, run the same modules in the same order and have as many"
    " gradients of each parameter"
)

MOST_NAMED = 4
"""Ranks that a sentence names in a group of ranks that are at one place."""


@dataclass(frozen=True)
class Position:
    """A rank's: what it waits for, and what it has launched.

    `channel`  the collective that it waits for, with all that must be equal on the ranks; None: it waits for none
    `number`   which of that channel's it is, from 1
    `peers`    the ranks that must launch it
    `words`    the same for people, and where the program is
    `launched` how many of each channel this rank has launched
    """

    rank: int
    channel: str | None
    number: int = 0
    words: str = ""
    launched: dict[str, int] = field(default_factory=dict)
    peers: list[int] = field(default_factory=list)

    def lacks(self, other: Position) -> bool:
        """Whether `other` waits for a collective that this rank has not launched."""
        return (
            other.channel is not None
            and self.rank in other.peers
            and self.launched.get(other.channel, 0) < other.number
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """What `to_json` gave."""
        return cls(**json.loads(text))


def circle(positions: Iterable[Position]) -> list[Position]:
    """The positions of ranks that wait for one another for ever; empty where there are none. See the note."""
    waiting = [one for one in positions if one.channel is not None]
    while True:
        held_up = [one for one in waiting if any(other.lacks(one) for other in waiting if other is not one)]
        if len(held_up) == len(waiting):
            return held_up
        waiting = held_up


def out_of_step(positions: Sequence[Position]) -> str:
    """The sentence for ranks that have come to different places; where they only had different counts, of what."""
    counts = "" if len({one.words for one in positions}) > 1 else f", {difference(positions)}"
    return f"the ranks are out of step: {places(positions)}{counts}; {RULE}"


def difference(positions: Sequence[Position]) -> str:
    """Of which channel the ranks have launched different numbers."""
    channels = dict.fromkeys(channel for one in positions for channel in one.launched)
    for channel in channels:
        counts = {one.rank: one.launched.get(channel, 0) for one in positions}
        if len(set(counts.values())) > 1:
            return f"of {channel} " + ", ".join(f"rank {rank} had {count}" for rank, count in counts.items())
    return "with as many of every collective"


def places(positions: Iterable[Position]) -> str:
    """Which rank is where, those at one place together."""
    ranks: dict[str, list[int]] = {}
    for one in sorted(positions, key=lambda one: one.rank):
        ranks.setdefault(one.words, []).append(one.rank)
    return ", ".join(f"{named(at)} {'is' if len(at) == 1 else 'are'} {words}" for words, at in ranks.items())


def named(ranks: Sequence[int]) -> str:
    """The ranks' numbers in words, of many the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
