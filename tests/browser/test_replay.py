"""The page of a recorded step in a browser: what it shows wherever the cursor stands is what the tables say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import zerobench
from tools.docs.chromium import Chromium
from zerobench.commands.perfetto import live_bytes
from zerobench.commands.replay.command import write_page
from zerobench.commands.replay.worlds import ReplayWorld, common_ticks, recorded_worlds
from zerobench.records import CATEGORIES
from zerobench.sizes import show_bytes

RECORDED = Path(__file__).parents[2] / "results/replay"
PLACES = (0, 400, 1234, 2600, 3141, 4500, 5000, 5772, 6300, 7777, 8888, 9500, 9990, 10_000)


@pytest.fixture(scope="module")
def world() -> ReplayWorld:
    return recorded_worlds(zerobench.load(RECORDED))[0]


@pytest.fixture(scope="module")
def page(world: ReplayWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded world, and a made-up one of 4 ranks with one stream for each strategy, and none for the last."""
    alone = [replace(panel, streams={1: panel.streams[1]}) for panel in world.panels]
    alone[-1] = replace(
        alone[-1], streams={}, problem="its execution was not to be", row=alone[-1].row | {"peak_bytes": None}
    )
    to = tmp_path_factory.mktemp("page") / "step.html"
    write_page(to, [world, ReplayWorld(4, "simulated", tuple(alone))])
    return to


def opened(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.wait_for("document.body.dataset.ready")


def scrub(browser: Chromium, tick: int) -> None:
    """As a user drags the cursor: the value changes, and the input says so."""
    words = (
        "const one = document.getElementById('scrub'); one.value = arguments[0]; one.dispatchEvent(new Event('input'))"
    )
    browser.run(words, tick)


def tick(browser: Chromium) -> int:
    return int(browser.run("return replay.tick"))


SHOWN = """return [...document.querySelectorAll('.panel')].map((panel) => ({
  name: panel.querySelector('h2').textContent, now: panel.querySelector('.now').textContent,
  bytes: Number(panel.querySelector('.now').dataset.bytes), sent: Number(panel.querySelector('.sent').dataset.bytes),
  sent_words: panel.querySelector('.sent').textContent,
  ranks: [...panel.querySelectorAll('.rank .size')].map((one) => ({...one.dataset, words: one.textContent})),
  blocks: [...panel.querySelectorAll('.map')].map((map) => map.blocks.filter((block) => block.getClientRects().length)
    .map((block) => [Number(block.getAttribute('class').match(/ c(\\d)/)[1]), block.spell.bytes])),
  flights: [...panel.querySelectorAll('.flight')].map(
    (one) => [Number(one.querySelector('.pill').dataset.bytes), one.textContent]),
}))"""


def test_every_number_wherever_the_cursor_stands_is_that_of_the_tables(
    browser: Chromium, page: Path, world: ReplayWorld
) -> None:
    streams = [stream for panel in world.panels for stream in panel.streams.values()]
    clocks = common_ticks(streams)
    sums = [live_bytes(stream)["device"] for stream in streams]
    opened(browser, page)
    browser.run("[...document.querySelectorAll('#ranks button')].at(-1).click()")  # all ranks
    seen = 0
    for place in PLACES:
        scrub(browser, place)
        found = browser.run(SHOWN)
        assert [one["name"] for one in found] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
        for number, one in enumerate(found):
            mine = range(2 * number, 2 * number + 2)
            for stream, rank, blocks in zip(mine, one["ranks"], one["blocks"], strict=True):
                event = int(np.searchsorted(clocks[stream], place, side="right")) - 1
                parts = [int(sums[stream][name].iloc[event]) for name in CATEGORIES]
                total = show_bytes(sum(parts))
                assert rank == {
                    "bytes": str(sum(parts)), "event": str(event), "rank": str(stream % 2),
                    "words": f"{total} · event {event:,}",
                }  # fmt: skip
                of_blocks = [sum(size for category, size in blocks if category == c) for c in range(len(CATEGORIES))]
                assert of_blocks == parts, "the blocks of the map are all that lives, by category"
            first = streams[mine[0]].iloc[: int(np.searchsorted(clocks[mine[0]], place, side="right"))]
            lives = int(one["ranks"][0]["bytes"])
            assert (one["bytes"], one["now"]) == (lives, show_bytes(lives))
            launches = first[(first["kind"] == "launch") & ~first["control"]]
            assert one["sent"] == launches["wire_bytes"].sum()
            assert one["sent_words"].startswith(f"sent {show_bytes(one['sent'])} of")
            seen += _check_flights(first, one["flights"])
    assert seen > 10


def _check_flights(before: pd.DataFrame, flights: list[Any]) -> int:
    """Holds each flight that is drawn against a launch that has not been waited for. Returns their number."""
    ended = set(before.loc[before["kind"] == "wait", "operation"])
    launched = before[(before["kind"] == "launch") & ~before["operation"].isin(ended)]
    sizes = launched.groupby("operation")["bytes"].sum().tolist()
    for size, words in flights:
        assert size in sizes
        assert show_bytes(size) in words
    return len(flights)
