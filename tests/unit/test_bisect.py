"""`zerobench bisect`: the commit that moved a metric, in so many runs as promised, without a trace in the checkout."""

from __future__ import annotations

import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests import toy_repository as toy
from tests.cells import cell
from tests.made_up import run as made_up_run
from zerobench import cli
from zerobench.commands.bisect.command import bisect
from zerobench.commands.bisect.launch import Launch, is_sweep, variables
from zerobench.commands.bisect.moved import LineMap
from zerobench.commands.run_to_end import Ended
from zerobench.records import LineRow
from zerobench.results.folders import claim_folder, write_run
from zerobench.watching.watch import WATCH_TO

KIB = 2**10


def figures(**values: Any) -> str:
    """A commit's figures, as `MadeUp` reads them; `says` replaces them by the words of a command that fails."""
    return json.dumps({"peak_bytes": 64 * KIB, "growth_bytes": 0} | values)


class MadeUp:
    """Runs of a commit without a process: its figures are in its file. `places`: the worktrees that it was given."""

    def __init__(self) -> None:
        self.places: list[Path] = []

    def __call__(self, place: Path, runs: Path) -> Ended:
        self.places.append(place)
        values = json.loads((place / "figures.json").read_text())
        runs.mkdir()
        if "says" in values:
            return Ended(1, values["says"])
        for strategy in values.pop("cells", ["ddp"]):
            line = LineRow(0, "peak", "activations", "net", values.get("line", "a.py:1 in f"), values["peak_bytes"], 1)
            row = made_up_run(strategy, 1, **{name: value for name, value in values.items() if name != "line"})
            write_run(claim_folder(runs, strategy), strategy, row, cell(strategy, 1).config, {}, {"lines": [line]})
        return Ended(0, "")


def commits_of(place: Path, texts: list[str], parents: dict[int, tuple[int, ...]] | None = None) -> list[str]:
    """A repository whose commits have these figures; their hashes."""
    return toy.repository(place, [{"figures.json": text} for text in texts], parents or {})


def found_by(capsys: Any, launcher: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Runs the verb; what it reports as JSON."""
    assert bisect([*arguments[:2], "--format", "json", *arguments[2:], "--", "made-up"], launcher) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository to be, in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "repository"


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_commit_is_found_within_the_bound(here: Path, capsys, seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 33)
    place = chance.randint(1, count)
    hashes = commits_of(here, [figures(peak_bytes=64 * KIB + (n >= place), psi=n) for n in range(count + 1)])
    launcher = MadeUp()
    found = found_by(capsys, launcher, hashes[0], hashes[-1], "--repo", str(here))
    (one,) = found["found"]
    assert one["commit"] == hashes[place]
    assert one["parent"] == hashes[place - 1]
    assert (one["before"], one["after"]) == (64 * KIB, 64 * KIB + 1)
    assert found["commits"] == count
    assert found["runs"] == len(launcher.places) <= math.ceil(math.log2(count)) + 2
    assert len(set(launcher.places)) == len(launcher.places), "each in a worktree of its own"
    assert not any(one.exists() for one in launcher.places)
    assert toy.git(here, "worktree", "list").count("\n") == 0
    again = found_by(capsys, launcher, hashes[0], hashes[-1], "--repo", str(here))
    assert again["runs"] == 0
    assert again["found"] == found["found"]


def test_what_cannot_be_measured_is_skipped_and_told(here: Path, capsys) -> None:
    texts = [figures(peak_bytes=KIB * (1 + (n >= 9)), psi=n) for n in range(13)]
    for n in (5, 6, 7, 8):
        texts[n] = figures(says=f"ImportError {n}")
    hashes = commits_of(here, texts)
    found = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--metric", "peak_bytes", "--repo", str(here), code=1)
    (one,) = found["found"]
    assert one["commit"] == hashes[9]
    assert sorted(one["suspects"]) == sorted(hashes[5:9])
    assert one["parent"] == hashes[4]
    assert {one["reason"] for one in found["skipped"]} == {
        f"the command ended with exit code 1: ImportError {n}" for n in (5, 6, 7, 8)
    }
    again = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--metric", "peak_bytes", "--repo", str(here), code=1)
    assert again["runs"] == 4, "a failure is not remembered: its reason may lie elsewhere"


def test_a_change_that_was_merged_is_found_on_its_branch(here: Path, capsys) -> None:
    """0 - 1 - 2 - 3 - - - 7(merge) - 8, and 1 - 4 - 5 - 6 - 7: the change is 5."""
    texts = [figures(peak_bytes=KIB * (1 + (n in (5, 6, 7, 8))), psi=n) for n in range(9)]
    hashes = commits_of(here, texts, {4: (1,), 7: (3, 6)})
    found = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--metric", "peak_bytes", "--repo", str(here))
    assert [one["commit"] for one in found["found"]] == [hashes[5]]
    assert found["found"][0]["parent"] == hashes[4]
    assert found["runs"] <= 2 + math.ceil(math.log2(8)) + 1


def test_a_merge_that_moves_it_alone_is_found(here: Path, capsys) -> None:
    texts = [figures(peak_bytes=KIB * (1 + (n == 4)), psi=n) for n in range(5)]
    hashes = commits_of(here, texts, {3: (1,), 4: (2, 3)})
    found = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--metric", "peak_bytes", "--repo", str(here))
    assert [one["commit"] for one in found["found"]] == [hashes[4]]


def test_of_several_changes_one_is_found_and_all_on_request(here: Path, capsys) -> None:
    sizes = [1, 1, 2, 2, 1, 1, 3, 3]
    hashes = commits_of(here, [figures(peak_bytes=KIB * size, growth_bytes=n // 7) for n, size in enumerate(sizes)])
    where = ("--repo", str(here))
    found = found_by(capsys, MadeUp(), hashes[0], hashes[-1], *where)
    (one,) = found["found"]
    place = hashes.index(one["commit"])
    assert sizes[place - 1] == 1 != sizes[place]
    assert found["moved_by_others"] == [{"cell": "ddp tiny N=1 b=2", "metric": "growth_bytes"}]
    every = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--all", *where)
    assert [one["commit"] for one in every["found"]] == [hashes[n] for n in (2, 4, 6)]
    above = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--metric", "peak_bytes", "--above", "2 KiB", *where)
    assert [one["commit"] for one in above["found"]] == [hashes[6]]
    assert above["runs"] == 0
    both = found_by(capsys, MadeUp(), hashes[0], hashes[-1], "--metric", "peak_bytes,growth_bytes", *where)
    assert both["found"][0]["commit"] in (hashes[2], hashes[6])
    assert both["found"][1]["commit"] == hashes[7]

    assert bisect([hashes[0], hashes[5], "--all", *where, "--", "made-up"], MadeUp()) == 1, "the ends are equal"
    capsys.readouterr()
    assert bisect([hashes[0], hashes[3], *where, "--", "made-up"], MadeUp()) == 0
    told = capsys.readouterr()
    assert f"{hashes[2][:10]} change 2\n  author date  2001-09-09T01:46:42+00:00\n" in told.out
    assert f"  git show {hashes[2][:10]}\n" in told.out
    assert "3 commits: at most 2 runs after those of GOOD and BAD" in told.err
    assert bisect([hashes[0], hashes[-1], *where, "--", "made-up"], MadeUp()) == 0
    told = capsys.readouterr()
    assert "moved by other commits: growth_bytes; search for one with --metric" in told.out
    assert "7 commits: at most 3 runs after those of GOOD and BAD" in told.err
    assert "; none left" in told.err
    assert bisect([hashes[0], hashes[1], *where, "--", "made-up"], MadeUp()) == 1
    assert "nothing moved from GOOD to BAD" in capsys.readouterr().out


def test_a_metric_that_differs_by_itself_is_compared_by_its_range(here: Path, capsys) -> None:
    """Peaks of the launches: 1 and 3 KiB up to the third commit, then 4 and 5; one launch would name another commit."""
    hashes = commits_of(here, [figures(psi=n) for n in range(6)])
    sizes = {hashes[n]: (1, 3) if n < 3 else (4, 5) for n in range(6)}
    seen: list[str] = []

    def launcher(place: Path, runs: Path) -> Ended:
        commit = toy.git(place, "rev-parse", "HEAD")
        seen.append(commit)
        size = sizes[commit][seen.count(commit) - 1] * KIB
        (place / "figures.json").write_text(figures(peak_bytes=size))
        return MadeUp()(place, runs)

    where = ("--launches", "2", "--repo", str(here))
    found = found_by(capsys, launcher, hashes[0], hashes[-1], *where)
    (one,) = found["found"]
    assert one["commit"] == hashes[3]
    assert (one["before"], one["after"]) == ([KIB, 3 * KIB], [4 * KIB, 5 * KIB])
    assert len(seen) == 2 * found["runs"]
    assert found_by(capsys, launcher, hashes[0], hashes[2], *where, code=1)["found"] == []
    assert bisect([hashes[0], hashes[-1], *where, "--", "made-up"], launcher) == 0
    assert "peak_bytes 1,024 to 3,072 → 4,096 to 5,120\n" in capsys.readouterr().out


def test_every_cell_is_searched_by_its_name(here: Path, capsys) -> None:
    cells = ["ddp", "ddp", "zero1"]
    texts = [figures(peak_bytes=KIB * (1 + (n > 1)), cells=cells if n != 2 else cells[:1]) for n in range(4)]
    hashes = commits_of(here, texts)
    where = ("--metric", "peak_bytes", "--repo", str(here))
    found = found_by(capsys, MadeUp(), hashes[0], hashes[-1], *where, code=1)
    names = ["ddp tiny N=1 b=2", "ddp tiny N=1 b=2 #2", "zero1 tiny N=1 b=2"]
    assert [one["cell"] for one in found["found"]] == names
    assert [one["commit"] for one in found["found"]] == [hashes[2], hashes[3], hashes[3]]
    assert [one["suspects"] for one in found["found"]] == [[], [hashes[2]], [hashes[2]]]
    only = found_by(capsys, MadeUp(), hashes[0], hashes[1], *where, "--where", "strategy=zero1", code=1)
    assert only["unmoved"] == [f"{names[2]}: peak_bytes is 1,024 at both ends"]


def test_an_interruption_leaves_nothing_behind(here: Path, capsys) -> None:
    hashes = commits_of(here, [figures(psi=n) for n in range(4)])
    (here / "figures.json").write_text("uncommitted")
    (here / "staged").write_text("staged")
    toy.git(here, "add", "staged")
    before = toy.git(here, "status", "--porcelain"), toy.git(here, "rev-parse", "HEAD")
    places = []

    def interrupted(place: Path, runs: Path) -> Ended:
        places.append(place)
        runs.mkdir()
        raise KeyboardInterrupt

    assert bisect([hashes[0], hashes[-1], "--repo", str(here), "--", "made-up"], interrupted) == 130
    assert capsys.readouterr().err.endswith("zerobench bisect: interrupted; what was measured is remembered\n")
    assert places
    assert not places[0].exists()
    assert not list(Path("results/bisect").iterdir())
    assert toy.git(here, "worktree", "list", "--porcelain").count("worktree ") == 1
    assert (toy.git(here, "status", "--porcelain"), toy.git(here, "rev-parse", "HEAD")) == before


def test_a_line_is_followed_through_a_change(tmp_path: Path) -> None:
    old = "".join(f"line {n}\n" for n in range(1, 11))
    new = "new\n" + old.replace("line 3\n", "").replace("line 5\n", "edited\n").replace("line 8\n", "line 8\nmore\n")
    hashes = toy.repository(tmp_path / "r", [{"a.py": old, "b.py": old}, {"a.py": new, "c.py": old + "end\n"}])
    places = LineMap(tmp_path / "r", *hashes)
    assert [places.after(f"a.py:{n} in f") for n in (1, 2, 4, 5, 8, 9, 10)] == [
        f"a.py:{n} in f" for n in (2, 3, 4, 5, 8, 10, 11)
    ]
    assert places.after("a.py:3 in f") == "a.py:3 in f", "a line that is gone keeps its words"
    assert places.after("backward of b.py:7 in Net.forward") == "backward of c.py:7 in Net.forward"
    assert places.after("torch/nn/linear.py:7 in forward") == "torch/nn/linear.py:7 in forward"
    assert places.after("") == ""


def test_a_command_runs_in_the_worktree_and_ends_with_what_it_started(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tree/src").mkdir(parents=True)
    monkeypatch.setenv("GIT_DIR", "/of/a/hook")
    there = variables(tmp_path / "tree", tmp_path / "runs")
    assert there[WATCH_TO] == str(tmp_path / "runs")
    assert there["PYTHONPATH"].startswith(f"{tmp_path}/tree{os.pathsep}{tmp_path}/tree/src")
    assert "GIT_DIR" not in there
    shown = Launch(("sh", "-c", "pwd; echo {runs}; exit 3"))(tmp_path / "tree", tmp_path / "runs")
    assert (shown.code, shown.said) == (3, str(tmp_path / "runs"))
    script = "sleep 300 & echo $! > child; wait"
    ended = Launch(("sh", "-c", script), timeout_s=0.5)(tmp_path / "tree", tmp_path / "runs")
    assert (ended.code, ended.said) == (None, "it took more than 0.5 s")
    child = Path(f"/proc/{(tmp_path / 'tree/child').read_text().strip()}/status")
    assert not child.exists() or "State:\tZ" in child.read_text()
    assert Launch(("no-such-program",))(tmp_path / "tree", tmp_path / "runs").code == 127
    with pytest.raises(KeyboardInterrupt):
        Launch(("sh", "-c", "exit 130"))(tmp_path / "tree", tmp_path / "runs")


@pytest.mark.parametrize(
    ("words", "sweep"),
    [("-m strategy=ddp,zero1", True), ("zerobench strategy=ddp", True), ("pytest tests", False), ("make x=1", False)],
)
def test_overrides_alone_are_a_sweep(words: str, sweep: bool) -> None:
    assert is_sweep(tuple(words.split())) == sweep


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["HEAD~1", "HEAD"], "say behind -- what is measured"),
        (["HEAD", "HEAD", "--", "x"], "GOOD and BAD are one commit"),
        (["HEAD", "HEAD~1", "--", "x"], "GOOD HEAD comes after BAD HEAD~1; turn them round"),
        (["side", "HEAD", "--", "x"], "GOOD side is no ancestor of BAD HEAD; `git merge-base side HEAD` names one"),
        (["nowhere", "HEAD", "--", "x"], "nowhere: git says: Needed a single revision"),
        (["HEAD~1", "HEAD", "--metric", "peak_byte", "--", "x"], "no such figure of a run; did you mean peak_bytes?"),
        (["HEAD~1", "HEAD", "--metric", "step_s", "--", "x"], "it does not repeat exactly; give a threshold"),
        (
            ["HEAD~1", "HEAD", "--above", "1GiB", "--", "x"],
            "--above 1GiB: a threshold is one of a metric; give --metric",
        ),
        (["HEAD~1", "HEAD", "--metric", "peak_bytes", "--below", "big", "--", "x"], "--below: 'big' is no size"),
        (["HEAD~1", "HEAD", "--launches", "0", "--", "x"], "--launches 0: must be 1 or more"),
        (["HEAD~1", "HEAD", "--timeout", "0", "--", "x"], "--timeout 0: must be above 0 seconds"),
        (["HEAD~1", "HEAD", "--repo", "nowhere", "--", "x"], "--repo nowhere: there is no such folder"),
        (["HEAD~1", "HEAD", "--", "x"], "cannot be measured: the command ended with exit code 1: no module"),
        (["HEAD~1", "HEAD", "--where", "strategy=zero9", "--", "y"], "--where strategy=zero9: no such run"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    here: Path, capsys, monkeypatch, arguments: list[str], words: str
) -> None:
    says = {"says": "no module"} if arguments[-1] == "x" else {}
    hashes = commits_of(here, [figures(psi=n, **says) for n in range(4)], {3: (1,)})
    toy.git(here, "branch", "side", hashes[2])
    monkeypatch.chdir(here)
    assert bisect(arguments, MadeUp()) == 2
    errors = capsys.readouterr().err.splitlines()
    assert words in errors[-1]
    assert errors[-1].startswith("zerobench bisect: ")
    assert toy.git(here, "worktree", "list").count("\n") == 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_training_script_is_bisected_in_processes_of_its_own(here: Path, capsys) -> None:
    """Worktrees and runs as a user has them; what was measured for one search serves the next."""
    fault = toy.FAULTS["an activation more"]
    moved = '"""Moved down."""\n' + toy.TRAIN
    versions = [toy.TRAIN, fault.plant(moved), fault.plant(moved) + "# the end\n"]
    hashes = toy.repository(here, [{"train.py": text, "n": str(n)} for n, text in enumerate(versions)])
    command = ["bisect", hashes[0], hashes[-1], "--repo", str(here), "--format", "json", "--", "python", "train.py"]
    assert cli.run(command) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["found"]
    assert one["commit"] == hashes[1]
    assert one["cell"] == "ddp toy N=1 b=64 momentum"
    assert one["after"] - one["before"] == 64 * 32 * 4
    assert one["parts"] == {"activations": 64 * 32 * 4}
    assert [move["source"] for move in one["lines"]] == [f"train.py:{fault.line(versions[1])} in Net.forward"]
    assert found["runs"] == 3
    assert toy.git(here, "status", "--porcelain") == ""


@pytest.mark.thorough
def test_twenty_planted_faults_are_found_with_their_lines(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(16)
    for number in range(20):
        kind = sorted(toy.FAULTS)[number % len(toy.FAULTS)]
        fault, count = toy.FAULTS[kind], chance.randint(2, 33)
        place, versions = chance.randint(1, count), []
        for n in range(count + 1):
            text = "".join(f"# note {m}\n" for m in range(n // 2)) + toy.TRAIN
            versions.append({"train.py": fault.plant(text) if n >= place else text, "n": str(n)})
        hashes = toy.repository(tmp_path / f"r{number}", versions)
        found = found_by(capsys, toy.run_forked, hashes[0], hashes[-1], "--repo", str(tmp_path / f"r{number}"))
        (one,) = found["found"]
        assert one["commit"] == hashes[place], kind
        assert found["runs"] <= math.ceil(math.log2(count)) + 2, kind
        assert next(iter(one["parts"])) == (fault.part or fault.category), kind
        line = fault.line(versions[place]["train.py"])
        assert re.fullmatch(rf"(backward of )?train.py:{line} in .*", one["lines"][0]["source"]), kind
        assert one["lines"][0]["category"] == fault.category
