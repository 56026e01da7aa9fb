"""The page of a recorded step in a browser: what it shows wherever the cursor stands is what the tables say."""

from dataclasses import asdict, replace
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
from zerobench.records import CATEGORIES, EventRow
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


def row(index: int, kind: str, **facts: Any) -> dict[str, Any]:
    """A made-up event."""
    return asdict(EventRow(0, index, index / 1000, facts.pop("phase", "backward"), kind, 0, **facts))


HOPS: list[dict[str, Any]] = [
    row(0, "live", storage=0, bytes=4096, category="parameters", tier="device", name="a.weight", phase="data"),
    row(1, "live", storage=1, bytes=8192, category="optimizer", tier="host", name="exp_avg", unit="a", phase="data"),
    row(2, "phase", name="backward"),
    row(3, "birth", storage=2, bytes=1024, category="temporary", tier="device", name="grown"),
    row(4, "label", storage=2, bytes=1024, category="gradients", previous="temporary", tier="device", name="grown"),
    row(5, "birth", storage=2, bytes=512, category="gradients", tier="device", name="grown"),
    row(6, "launch", operation=0, bytes=512, wire_bytes=384.0, group_size=2, collective="reduce_scatter", unit="a"),
    row(7, "launch", operation=0, bytes=256, wire_bytes=128.5, group_size=2, collective="reduce_scatter", unit="a"),
    row(8, "wait", operation=0),
    row(9, "move", bytes=768, collective="down", operator="copy_", tier="host", name="grown"),
    row(10, "free", storage=2, bytes=1500, category="gradients", tier="device", name="grown"),
    row(11, "free", storage=2, bytes=36, category="gradients", tier="device", name="grown"),
]  # fmt: skip
"""A step with what the recorded runs have not: two tiers, hops among some ranks, a storage that grows and shrinks."""


def test_tiers_hops_and_storages_that_grow_are_shown(browser: Chromium, world: ReplayWorld, tmp_path: Path) -> None:
    panel = replace(world.panels[3], streams={0: pd.DataFrame(HOPS)})
    write_page(tmp_path / "hops.html", [replace(world, ranks=4, panels=(panel,))])
    opened(browser, tmp_path / "hops.html")
    seen = []
    for place in browser.run("return replay.stops"):
        scrub(browser, place)
        (one,) = browser.run(SHOWN)
        event = int(one["ranks"][0]["event"])
        sums = live_bytes(pd.DataFrame(HOPS)).iloc[event]
        assert one["bytes"] == sums["device"].sum()
        assert sum(size for _, size in one["blocks"][0]) == sums.sum(), "blocks of both tiers"
        assert (event >= 9) is (browser.run(MOVED) == '{"down":768}')
        if event in (6, 7):
            size = {6: 512, 7: 768}[event]
            assert one["flights"] == [[size, f"reduce-scatter · a{size} B among 2"]]
            assert one["sent"] == {6: 384, 7: 512.5}[event]
        seen.append(event)
    assert seen[-6:] == [6, 7, 8, 9, 10, 11]
    scrub(browser, browser.run("return replay.stops.at(-6)"))
    facts = """replay.point(document.querySelector('.flight .pill'));
    return [...document.querySelectorAll('#card dd')].map((one) => one.textContent)"""
    volume = f"volume of a step: {panel.formulas['volume'].equation} elements = {panel.formulas['volume'].value:,}. "
    assert browser.run(facts) == [
        "reduce-scatter", "a", "2", "event 6, by no line of Python", "512 B of tensors, 384 B sent by a rank",
        f"{volume}ZeRO, arXiv 1910.02054, section 7.2.2",
    ]  # fmt: skip
    press(browser, "\ue010")  # End
    assert browser.run("return document.querySelector('.map').blocks.filter((one) => one.shown).length") == 2


MOVED = "return document.querySelector('svg.tiers').dataset.moved"


def opened(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.wait_for("document.body.dataset.ready")


def scrub(browser: Chromium, tick: int) -> None:
    """As a user drags the cursor: the value changes, and the input says so."""
    words = (
        "const one = document.getElementById('scrub'); one.value = arguments[0]; one.dispatchEvent(new Event('input'))"
    )
    browser.run(words, tick)


def press(browser: Chromium, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver).send_keys(*keys).perform()


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


def test_keys_go_through_the_step(browser: Chromium, page: Path, world: ReplayWorld) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, page)
    press(browser, Keys.END)
    assert tick(browser) == 10_000
    press(browser, Keys.HOME)
    assert tick(browser) == 0
    stops = sorted({int(t) for t in browser.run("return replay.stops")})
    after = [stop for stop in stops if stop > 0]
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert tick(browser) == after[1]
    press(browser, Keys.ARROW_LEFT)
    assert tick(browser) == after[0]
    press(browser, Keys.PAGE_DOWN)
    phases = browser.run("return replay.world.phases.map((one) => one[1])")
    assert tick(browser) in phases
    press(browser, Keys.SPACE)
    browser.driver.execute_async_script("setTimeout(arguments[0], 400)")
    press(browser, Keys.SPACE)
    played = tick(browser)
    assert played > phases[0]
    browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
    assert tick(browser) == played, "space has stopped it"
    browser.run("document.querySelector('.map').focus()")
    press(browser, Keys.ARROW_RIGHT)
    assert tick(browser) == played, "in a map the arrows go from block to block"
    assert browser.run("return document.getElementById('card').hidden") is False
    press(browser, Keys.ESCAPE)
    assert browser.run("return document.getElementById('card').hidden") is True
