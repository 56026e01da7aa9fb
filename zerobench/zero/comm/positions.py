"""Positions of ranks: deadlocks are found from what each rank has launched, and reported in one sentence.

[Note: a circle of waiting ranks]
A rank *lacks* a collective that another rank waits for if it has launched that channel fewer times. A rank that lacks
it while it computes, or writes a file for minutes, is slow, which is no fault. Where it waits itself, for a collective
that the other rank lacks, neither can ever proceed. So

    a fault := a set of ranks that all wait, each of them for a collective that another one of the set lacks

Counts only grow, and a waiting rank launches nothing. Positions that were published at different times, or are out of
date, therefore show no false circle: the first rank to leave it would have needed another one to leave before.
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
"""Most ranks that a sentence names where many are at one position."""


@dataclass(frozen=True)
class Position:
    """A rank's position: the collective that it waits for, and the counts of those that it has launched.

    `channel`  the collective that it waits for, with all that must be equal on the ranks; None: it waits for none
    `number`   its number in that channel, from 1
    `peers`    the ranks that must launch it
    `words`    a description for messages, with the program's line
    `launched` number of collectives that this rank has launched, by channel
    """

    rank: int
    channel: str | None
    number: int = 0
    words: str = ""
    launched: dict[str, int] = field(default_factory=dict)
    peers: list[int] = field(default_factory=list)

    def lacks(self, other: Position) -> bool:
        """Returns True where `other` waits for a collective that this rank has not launched."""
        return (
            other.channel is not None
            and self.rank in other.peers
            and self.launched.get(other.channel, 0) < other.number
        )

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """Parses the text of `to_json`."""
        return cls(**json.loads(text))


def circle(positions: Iterable[Position]) -> list[Position]:
    """Returns the positions of ranks in a deadlock, or an empty list. [Note: a circle of waiting ranks]"""
    waiting = [one for one in positions if one.channel is not None]
    while True:  # drop ranks that can proceed, until the set no longer shrinks: the rest wait for each other
        held_up = [one for one in waiting if any(other.lacks(one) for other in waiting if other is not one)]
        if len(held_up) == len(waiting):
            return held_up
        waiting = held_up


def out_of_step(positions: Sequence[Position]) -> str:
    """Returns the sentence for ranks at different positions, or at one position with different counts."""
    counts = "" if len({one.words for one in positions}) > 1 else f", {difference(positions)}"
    return f"the ranks are out of step: {places(positions)}{counts}; {RULE}"


def difference(positions: Sequence[Position]) -> str:
    """Names the first channel of which the ranks have launched different numbers."""
    channels = dict.fromkeys(channel for one in positions for channel in one.launched)
    for channel in channels:
        counts = {one.rank: one.launched.get(channel, 0) for one in positions}
        if len(set(counts.values())) > 1:
            return f"of {channel} " + ", ".join(f"rank {rank} had {count}" for rank, count in counts.items())
    return "with as many of every collective"


def places(positions: Iterable[Position]) -> str:
    """Says which rank is where; ranks at one position are named together."""
    ranks: dict[str, list[int]] = {}
    for one in sorted(positions, key=lambda one: one.rank):
        ranks.setdefault(one.words, []).append(one.rank)
    return ", ".join(f"{named(at)} {'is' if len(at) == 1 else 'are'} {words}" for words, at in ranks.items())


def named(ranks: Sequence[int]) -> str:
    """Lists rank numbers in words; of many, the first MOST_NAMED."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
