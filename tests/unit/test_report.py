"""The page of a report: each number is the tables', nothing of a run's folder is markup, odd folders get a sentence."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.records import CATEGORIES, COLLECTIVES
from zerobench.results.summary import summarize
from zerobench.results.tables import collect, load

STAGES = Path("results/reference/cpu/stages")
EVIL = "<script>alert('evil')</script><b>&amp;"


class Page(HTMLParser):
    """`bars`: (label, part, value) of each drawn part; `text`: all that is shown; `data`: the columns of runs."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html, self.text, self.tags = path.read_text(), "", []
        self.bars: list[tuple[str, str, float]] = []
        self._inside = ""
        self.feed(self.html)
        self.data = {one["name"]: one for one in json.loads(re.findall(r'id="data">(.*?)</script>', self.html)[0])}
        for one in self.data.values():
            for key in {"values", "texts"} & one.keys() if "of" in one else ():
                one[key] = [one[key][place] for place in one["of"]]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        told, self._inside = dict(attributes), tag
        self.tags.append(tag)
        if "data-value" in told:
            label = str(told["data-tip"]).split("\n")[0]
            self.bars.append((label, str(told["data-part"]), float(str(told["data-value"]))))

    def handle_data(self, text: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += text


def page_of(out: Path, *arguments: object, code: int = 0) -> Page:
    assert cli.run(["report", *map(str, arguments), "--out", str(out)]) == code
    return Page(out)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(tmp_path_factory.mktemp("stages") / "report.html", STAGES)


@pytest.mark.slow
def test_every_bar_is_a_number_of_the_tables(stages: Page) -> None:
    expected = set()
    for row in summarize(load(STAGES).runs).to_dict("records"):
        sizes = {name: row[f"peak_{name}_bytes"] for name in CATEGORIES} | {"states": row["states_bytes"]}
        sizes |= {name: row[f"volume_{name}_psi"] for name in COLLECTIVES}
        sizes |= {name: row[f"{name}_s"] for name in ("step", "forward", "backward", "update")}
        expected |= {(row["strategy"], name, float(size)) for name, size in sizes.items() if size}
        assert sum(sizes[name] for name in CATEGORIES) == row["peak_bytes"]
    assert set(stages.bars) == expected
    assert len(stages.bars) == len(expected)


@pytest.mark.slow
def test_the_table_holds_every_value_of_the_runs(stages: Page) -> None:
    runs = load(STAGES).runs
    for name in ("peak_bytes", "states_bytes", "predicted_states_bytes", "volume_psi", "step_s", "run_id", "commit"):
        assert stages.data[name]["values"] == list(runs[name]), name
    assert stages.data["step ms"]["values"] == list(runs["step_s"])
    shown = [name for name, column in stages.data.items() if column["shown"]]
    assert shown[:3] == ["cell", "status", "peak MiB"]
    assert all(column["meaning"] for column in stages.data.values())


def test_the_verdict_says_which_is_least_what_it_costs_and_how_surely(stages: Page) -> None:
    cells = summarize(load(STAGES).runs).set_index("strategy")
    least, first = cells["peak_bytes"].astype(int).idxmin(), cells["step_s"].idxmin()
    assert f"{least}: {cells.loc[least, 'peak_bytes'] / 2**20:.1f} MiB at the peak" in stages.text
    ratio = cells.loc[least, "step_s"] / cells.loc["ddp", "step_s"]
    assert f"{ratio:.3f} times the step of ddp (no verdict)" in stages.text
    low, high = (cells.loc[first, f"step_s_{end}"] * 1000 for end in ("low", "high"))
    assert f"{first}: {cells.loc[first, 'step_s'] * 1000:.1f} ms a step (95 % interval {low:.1f}–{high:.1f} ms)" in (
        stages.text
    )
    assert "measure.repeats=3 measures by how much" in stages.text  # of one launch each
    assert "states are met to the byte, volumes to the element" in stages.text


def test_accounts_provenance_and_commands_are_those_of_the_runs(stages: Page) -> None:
    runs = load(STAGES).runs
    for words in (
        runs["command"].iloc[0],
        runs["processor"].iloc[0],
        runs["torch_version"].iloc[0],
        f"git checkout {runs['commit'].iloc[0]}",
    ):
        assert words in stages.text
    assert stages.text.count("Largest tensors at the peak") == len(runs)
    assert "residual" in stages.text


def test_it_asks_for_nothing_and_forbids_it(stages: Page) -> None:
    assert "default-src 'none'" in stages.html
    assert not re.findall(
        r"(?:src|href|url)[=(]\"?(?!#|\"#)[^ >]*",
        stages.html.split("</style>")[1].split("<script>")[0].replace("url(#", ""),
    )
    assert len(stages.html) < 200_000


@pytest.mark.slow
def test_what_runs_hold_is_text_and_never_markup(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make(runs, "zero1", command=EVIL, processor=EVIL)
    lines = [f"line {n} {EVIL}\x1b[2J" for n in range(30)]
    make(runs, "zero2", status="crash", reason=EVIL, logs={"timed/rank0.log": "\n".join(lines)})
    page = page_of(tmp_path / "page.html", runs, "--title", EVIL)
    assert "<script>alert" not in page.html
    assert page.tags.count("script") == 2  # the data and the page's own
    assert page.text.count(EVIL) >= 5
    assert "the last 20 of 30 lines" in page.text
    assert "line 9 " not in page.text
    assert "\\x1b[2J" in page.text


def test_failed_runs_alone_make_a_page_that_says_so(tmp_path: Path) -> None:
    make(tmp_path / "runs", "zero1", status="oom", reason="ran out of memory at 3 GiB")
    page = page_of(tmp_path / "page.html", tmp_path / "runs")
    assert "No run is ok, so there is nothing to compare: of 1 cell 1 oom." in page.text
    assert "ran out of memory at 3 GiB" in page.text
    assert "No log: its logs are empty." in page.text
    assert not page.bars


@pytest.mark.slow
def test_one_cell_and_several_devices_are_told(tmp_path: Path) -> None:
    make(tmp_path / "runs", "zero1")
    assert "One cell: there is nothing to compare it with." in page_of(tmp_path / "page.html", tmp_path / "runs").text
    make(tmp_path / "runs", "ddp", device_class="a GPU", processor="another")
    page = page_of(tmp_path / "page.html", tmp_path / "runs")
    assert "Runs of 2 devices, a GPU, cpu" in page.text
    assert "not comparable in time: zero1" in page.text or "not comparable in time: ddp" in page.text


@pytest.mark.thorough
def test_the_headline_counts_wins_that_are_proven_and_none_of_a_busy_machine(tmp_path: Path) -> None:
    """Three launches of two cells in turns, in two settings: with seed 1 the times differ by twice, with 2 by noise."""
    results = load(STAGES)
    two = results.runs[results.runs["strategy"].isin(["ddp", "zero1"])]
    launches = []
    for seed, slower in ((1, 2.0), (2, 1.001)):
        for number in range(3):
            one = two.assign(seed=seed, repeat=number, run_id=two["run_id"] + f"/{seed}{number}", others_cores=0.1)
            one["config"] = [json.dumps(json.loads(text) | {"seed": seed}) for text in one["config"]]
            one["cell_id"] = one["cell_id"] + str(seed)
            one["started"] = [f"2026-01-0{seed}T0{number}:0{place}:00.000+00:00" for place in range(len(one))]
            one["step_s"] = [
                0.1 * (1 + 0.001 * number) * (slower if name == "zero1" else 1) for name in one["strategy"]
            ]
            launches.append(one)
    runs = pd.concat(launches, ignore_index=True)

    def headline(of: pd.DataFrame, name: str) -> str:
        collect(type(results)(**{**vars(results), "runs": of}), tmp_path / name)
        return page_of(tmp_path / f"{name}.html", tmp_path / name).text

    quiet = headline(runs, "quiet")
    assert "Fastest, of 2 settings with two cells or more: ddp in 1, not proven in 1." in quiet
    assert "not told apart from it: zero1" in quiet
    busy = headline(runs.assign(others_cores=[1.9, *[0.1] * (len(runs) - 1)]), "busy")
    assert "The machine was busy while 1 of 4 cells ran: other processes took up to 1.9 of its" in busy
    assert "Fastest, of 2 settings with two cells or more: not proven in 2." in busy


@pytest.mark.slow
def test_a_cell_without_times_stands_beside_those_with(tmp_path: Path) -> None:
    times = ("step_s", "forward_s", "backward_s", "update_s", "tokens_per_s")
    make(tmp_path / "runs", "zero3", **dict.fromkeys(times))
    make(tmp_path / "runs", "ddp", peak_bytes=6 * 2**20)
    page = page_of(tmp_path / "page.html", tmp_path / "runs")
    assert "ddp: 250.0 ms a step (too few for an interval)" in page.text
    assert "times are not comparable: there are none" in page.text


def test_runs_whose_bytes_no_pass_counted_have_no_prediction_to_meet(tmp_path: Path) -> None:
    page = page_of(tmp_path / "page.html", STAGES.parents[2] / "h100")
    assert "to the element; without a prediction: zero1 passes=timed" in page.text


def moved(to: Path, **changes: float) -> Path:
    """The stages with a change of zero1's row."""
    results = load(STAGES)
    for column, by in changes.items():
        results.runs.loc[results.runs["strategy"] == "zero1", column] += by
    collect(results, to)
    return to


@pytest.mark.slow
def test_of_two_folders_it_says_what_moved_in_which_category_by_how_much(tmp_path: Path) -> None:
    mib = 2**20
    b = moved(tmp_path / "b", peak_bytes=mib, peak_communication_bytes=mib, states_bytes=mib)
    page = page_of(tmp_path / "page.html", STAGES, b)
    zero1 = summarize(load(STAGES).runs).set_index("strategy").loc["zero1"]
    share = 100 * mib / zero1["peak_bytes"]
    assert re.search(
        rf"grew in 1 of 4 cells, most in zero1 .*?: \+1.0 MiB \(\+{share:.1f} %\); communication \+1.0 MiB", page.text
    )
    assert "equal, exactly, in all 4 cells" in page.text  # the traffic
    (bar,) = [one for one in page.bars if one[1] != "step"]
    assert bar[1:] == ("communication", float(mib))
    assert "noise in 4 of 4 cells" in page.text
    assert page.data["side"]["values"] == ["A"] * 4 + ["B"] * 4
    same = page_of(tmp_path / "same.html", STAGES, STAGES, "--where", "strategy=ddp")
    assert not same.bars
    assert same.text.count("equal, exactly, in the only cell") == 3


SENTENCES: dict[str, tuple[list[str], str]] = {
    "an empty folder": (["EMPTY"], "no runs here; `zerobench experiment=stages results_dir="),
    "a folder of folders": (["ABOVE"], "reports those in it"),
    "nothing in common": (["ONE", str(STAGES)], "; `zerobench report` of each shows its cells"),
    "a negative effect": (["ONE", "--minimum-effect", "-1"], "--minimum-effect -1.0: must be 0 or more"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SENTENCES)
def test_a_folder_without_a_report_gets_one_sentence(tmp_path: Path, capsys: Any, case: str) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "above" / "one", "zero2")
    places = {"EMPTY": "empty", "ABOVE": "above", "ONE": "above/one"}
    words, sentence = SENTENCES[case]
    given = [str(tmp_path / places[word]) if word in places else word for word in words]
    assert cli.run(["report", *given, "--out", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("zerobench report: ")
    assert sentence in line
    assert not (tmp_path / "page.html").exists()


def test_a_folder_is_no_file_to_write_to(tmp_path: Path, capsys: Any) -> None:
    assert cli.run(["report", str(STAGES), "--out", str(tmp_path)]) == 2
    assert "is a folder; name a file, as" in capsys.readouterr().err
