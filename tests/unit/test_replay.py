"""The recorded step as a page: every number on it is one of the tables."""

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerobench
from zerobench import cli
from zerobench.commands.perfetto import live_bytes
from zerobench.commands.replay import command
from zerobench.commands.replay.command import NUMBERS, WORDS, page_data
from zerobench.commands.replay.worlds import ReplayWorld, executed_worlds, recorded_worlds
from zerobench.records import CATEGORIES

RECORDED = Path(__file__).parents[2] / "results/replay"
DATA = re.compile(r'(?<=id="data">)(.*?)(?=</script>)', re.DOTALL)


@pytest.fixture(scope="module")
def results() -> zerobench.Results:
    return zerobench.load(RECORDED)


@pytest.fixture(scope="module")
def world(results: zerobench.Results) -> ReplayWorld:
    return recorded_worlds(results)[0]


def inflated(text: str) -> dict[str, Any]:
    """The data that a page holds, as its script reads them."""
    return dict(json.loads(zlib.decompress(base64.b64decode(text))))


def test_the_pages_data_are_the_tables(world: ReplayWorld) -> None:
    """Each value of each event, read back as the page reads it."""
    found = inflated(DATA.search(command.page_text([world]))[1])
    strings = found["strings"]
    for panel, packed in zip(world.panels, found["worlds"][0]["panels"], strict=True):
        assert [packed[name] for name in ("peak_bytes", "states_bytes", "wire_bytes", "volume_psi", "run_id")] == [
            panel.row[name] for name in ("peak_bytes", "states_bytes", "wire_bytes", "volume_psi", "run_id")
        ]
        assert {name: form["value"] for name, form in packed["formulas"].items()} == {
            name: form.value for name, form in panel.formulas.items()
        }
        for (rank, events), stream in zip(panel.streams.items(), packed["streams"], strict=True):
            assert (stream["rank"], stream["length"]) == (rank, len(events))
            column = {name: stream["columns"].get(name, [0] * len(events)) for name in (*WORDS, *NUMBERS, "wire_bytes")}
            for name in WORDS:
                assert [strings[one] for one in column[name]] == events[name].fillna("").tolist(), name
            for name in (*NUMBERS, "wire_bytes"):
                assert column[name] == events[name].fillna(0).tolist(), name
            for name in ("storage", "operation"):
                assert [one - 1 for one in stream["columns"][name]] == events[name].fillna(-1).tolist(), name
            microseconds = np.cumsum(stream["columns"]["us"])
            assert np.abs(microseconds / 1e6 - events["seconds"]).max() < 1e-6


def test_the_committed_page_is_todays(world: ReplayWorld) -> None:
    """Its code and style, and of its data the measured world; what was executed is not executed again here."""
    committed, now = (RECORDED.parents[1] / "docs/assets/replay/step.html").read_text(), command.page_text([world])
    assert [DATA.sub("", text) for text in (committed, now)] == [DATA.sub("", now)] * 2, "run `make replay`"
    theirs, ours = (inflated(DATA.search(text)[1]) for text in (committed, now))
    assert [one["n"] for one in theirs["worlds"]] == [2**power for power in range(1, 11)]
    assert {one["how"] for one in theirs["worlds"][1:]} == {"simulated"}
    assert theirs["worlds"][0] == ours["worlds"][0]
    assert theirs["strings"][: len(ours["strings"])] == ours["strings"]


def test_a_page_asks_for_nothing_and_escapes_what_runs_say(world: ReplayWorld) -> None:
    hostile = "</script><script>alert(1)</script><b>"
    first = world.panels[0]
    planted = replace(first, row=first.row | {"model": hostile, "command": hostile})
    text = command.page_text([replace(world, panels=(planted, *world.panels[1:]))])
    assert hostile not in text
    assert text.count("<script") == 2
    assert not re.search(
        r"""(src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!['"]?#)""", text.replace("url(#f${", "url(#")
    )


def test_a_page_that_is_too_large_is_not_written(world: ReplayWorld, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(command, "LIMIT_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"above 9.8 KiB; leave ranks"):
        command.write_page(tmp_path / "step.html", [world])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--worlds", "2,x"], "--worlds 2,x: 'x' is no number from 1 to 1,024"),
        (["--worlds", "4096"], "'4096' is no number from 1 to 1,024"),
        (["--ranks", "0,7", "--worlds", "none"], "--ranks 7: DDP at N=2 has recorded ranks 0, 1"),
        (["--worlds", "2", "--cluster", "h100-3200"], "--worlds 2 simulates none; give other numbers of ranks"),
        (["--where", "strategy=zero9"], "--where strategy=zero9: no such run"),
    ],
)
def test_a_refusal_is_one_sentence(words: list[str], sentence: str, capsys, tmp_path) -> None:
    assert cli.run(["replay", str(RECORDED), "--out", str(tmp_path / "step.html"), *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_events_the_command_that_records_them_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", str(RECORDED.parent / "reference/cpu/stages")]) == 2
    said = capsys.readouterr().err
    assert re.search(r"no finished run has a table of events; record one with: zerobench .+events=true\n", said)


def test_runs_of_different_settings_are_no_one_page(results: zerobench.Results) -> None:
    other = results.runs.copy()
    other.loc[other.index[-1], "optimizer"] = "sgd"
    with pytest.raises(ValueError, match=r"runs differ in optimizer, which is .* and sgd; choose one with --where"):
        recorded_worlds(replace(results, runs=other))


@pytest.mark.slow
def test_an_executed_step_is_the_recorded_one(world: ReplayWorld) -> None:
    """At the measured N: the fullest rank's bytes of each category, event by event as their maxima, and its traffic."""
    stage3 = world.panels[3]
    (executed,) = executed_worlds([stage3], [2], jobs=1)
    panel = executed.panels[0]
    assert (executed.how, panel.problem) == ("simulated", "")
    ((rank, events),) = panel.streams.items()
    of_both = [live_bytes(stream)["device"] for stream in (events, stage3.streams[rank])]
    shown = [stream["kind"] != "live" for stream in (events, stage3.streams[rank])]
    for name in CATEGORIES:
        ours, theirs = (int(sums[name][here].max()) for sums, here in zip(of_both, shown, strict=True))
        assert ours == theirs, name
    for column in ("peak_bytes", "states_bytes", "wire_bytes", "volume_psi"):
        assert panel.row[column] == stage3.row[column], column
    forms = {name: form.value for name, form in panel.formulas.items()}
    assert forms == {name: form.value for name, form in stage3.formulas.items()}
    assert page_data([executed], {})["worlds"][0]["panels"][0]["label"] == "ZeRO-3"
