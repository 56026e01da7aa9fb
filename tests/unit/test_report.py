"""The page of a report: each number is the tables', nothing of a run's folder is markup, odd folders get a sentence."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.budgets.comparison import Judge
from zerobench.commands.report.settings import group_by_setting, setting_verdict
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


def test_cells_of_one_choice_have_names_and_predictions_of_their_own() -> None:
    runs = load(STAGES.parent / "offload_time").runs
    runs.loc[runs["config"].str.contains('"fraction": ?0.5'), "states_bytes"] += 1000
    (setting,) = group_by_setting(runs)
    assert len({cell.name for cell in setting.cells}) == len(setting.cells) == 5
    answers = dict(setting_verdict(setting, Judge(0.0, [])))
    assert re.search(r"differ by zero2 offload=cpu fraction=0.5 \S+ \S+ \+1,000 B,", answers["Predictions"])
    assert "72.0 MiB in host memory, 30 % less than" in answers["Least memory"], "the sum of both is compared"


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


def moved(to: Path, **changes: float) -> Path:
    """The stages with a change of zero1's row."""
    results = load(STAGES)
    for column, by in changes.items():
        results.runs.loc[results.runs["strategy"] == "zero1", column] += by
    collect(results, to)
    return to


@pytest.mark.thorough
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
