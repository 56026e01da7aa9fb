"""README and docs/: links, names, paths and commands are real; numbers are those of the committed runs."""

import argparse
import csv
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import zerobench
from analysis.__main__ import FIGURES
from tools.docs import notebook
from tools.docs.pages import pages
from tools.docs.recorded import PROMINENT, REFERENCE, older
from tools.docs.references import OTHER_SYSTEMS
from zerobench import cli
from zerobench.cli import VERBS
from zerobench.config.compose import RefusedError, check_line, make_composer
from zerobench.config.composer import Composer
from zerobench.config.flags import split_arguments, unknown_flags
from zerobench.config.keys import GROUPS, KEYS

ROOT = Path(__file__).parents[2]
PAGES = [*pages(), ROOT / "SECURITY.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MADE = ("results/runs", "results/mlp", "results/calibration", "build/", "results/budgets/")
"""Paths that a reader's own commands make."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(params=PAGES, ids=name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


# -- links ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head).lower()).strip().replace(" ", "-") for head in heads}


def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    wrong = []
    for link in LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        there = target.startswith(("http:", "https:")) or file.exists()
        if not there or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(link)
    assert wrong == []


# -- code ----------------------------------------------------------------------------------------------


def test_python_on_a_page_compiles_and_its_names_of_ours_exist(page: Path) -> None:
    text = page.read_text()
    for language, block in FENCE.findall(text):
        if language == "python":
            compile(block, name(page), "exec")
    named = set(re.findall(r"(?<!\.)\bzerobench(?:\.\w+)+", " ".join(INLINE.findall(prose(page)))))
    named |= {
        n for language, b in FENCE.findall(text) if language == "python" for n in re.findall(r"\bzerobench\.[\w.]+", b)
    }
    assert [one for one in sorted(named) if not exists(one)] == []


def exists(dotted: str) -> bool:
    """True for a module below zerobench, or an attribute of one."""
    parts = dotted.rstrip(".").split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return all(hasattr(found, part) and (found := getattr(found, part), True) for part in parts[cut:])
    return False


def test_every_path_on_a_page_exists(page: Path) -> None:
    paths = re.compile(r"(?:zerobench|analysis|tools/docs|tests|conf|examples|docs|results|build)/[\w./-]*")
    named = {code for code in INLINE.findall(prose(page)) if paths.fullmatch(code)}
    assert [one for one in sorted(named) if not (ROOT / one).exists() and not one.startswith(MADE)] == []


# -- references ----------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_other_systems_names_belong_to_keys() -> None:
    with OTHER_SYSTEMS.open(newline="") as file:
        assert {row["key"] for row in csv.DictReader(file)} <= {*KEYS, *GROUPS}


MENTION = re.compile(r"(?<![\w./{*<-])[\w/]+\.py\b")
OF_USERS = {
    "tests/test_memory.py", "mine.py", "train.py", "train_zero.py", "model.py", "test_memory.py", "shard.py",
    "resume.py",
}  # fmt: skip
"""Scripts of a reader's own, in examples; `zerobench plan` writes shard.py."""

RECORDED = re.compile(r"[\w/]+\.py(:\d+)? in\b")
"""Lines of code as a committed run recorded them; later code may have moved them."""

OF_OTHERS = {"pretrain_gpt.py", "megatron/training/arguments.py"}
"""Files of Megatron-LM."""


def test_every_file_that_is_named_is_there() -> None:
    code = [
        path
        for folder in ("zerobench", "validation", "analysis", "tools/docs", "examples", "requirements", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    pages = [ROOT / "Makefile", *ROOT.glob("[RC]*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "conf").rglob("*.yaml")
    found = {"/".join(path.relative_to(ROOT).parts[-n:]) for path in code for n in range(1, len(path.parts))}
    there = found | OF_USERS | OF_OTHERS
    named = {
        (mention, f"{path.relative_to(ROOT)}:{number}")
        for path in [*(p for p in code if p.parts[len(ROOT.parts)] != "tests"), *pages]
        if path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for mention in MENTION.findall(RECORDED.sub("", line))
    }
    assert sorted(where for mention, where in named if mention not in there) == []


PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.")
"""In inline code: FILE, PATH, KEY=VALUE."""
VALUED = ("--where", "--tolerance", "--packages", "--python")
"""Options whose value looks like an override."""
SWEEP_ANYWAY = ("estimate", "plan", "predict")
"""Verbs whose overrides are a sweep's without -m."""
OF_READERS = ("mine.py", "train.py", "train_zero.py")
LAUNCHERS = ("srun", "mpirun", "watch", "torchrun")
SHELL = ("source", "patch", "pip", "cd", "git", "eval", "pytest", "fio", "rsync", "#")
"""What else a block of commands may begin with."""


class ParsedError(Exception):
    """argparse has accepted a command line; the command itself is not run."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse parses, and what it was asked for stops there."""
    real = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        found = real(self, *arguments, **named)
        if flags := [word for word in found[1] if word.startswith("-") and word not in ("-m", "--")]:
            self.error(f"unrecognized arguments: {flags}")
        raise ParsedError(found[1])

    def parse_args(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        try:
            return parse_known_args(self, *arguments, **named)[0]
        except ParsedError as accepted:
            if accepted.args[0]:
                self.error(f"unrecognized arguments: {accepted.args[0]}")
            raise

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


def line_tables(page: Path) -> Iterator[str]:
    """Commands of the page's bash blocks, and inline ones without placeholders."""
    text = page.read_text()
    for language, block in FENCE.findall(text):
        if language in ("bash", "sh"):
            yield from filter(None, map(str.strip, block.replace("\\\n", " ").splitlines()))
    for code in INLINE.findall(FENCE.sub("", text)):
        is_command = code.startswith(("zerobench ", "make ")) and not PLACEHOLDER.search(code)
        if is_command and code.removeprefix("zerobench ") not in VERBS:  # a verb alone is only named
            yield code


@cache
def problem_of(line: str) -> str:
    """Why a command line would be refused; empty where it would not."""
    words = shlex.split(line.partition(" | ")[0], comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words or words[0] in SHELL:
        return ""
    if words[0] in LAUNCHERS:
        if script := next((word for word in words if word.endswith(".py")), ""):
            return "" if is_script(script) else f"{script}: no such script"
        return problem_of(shlex.join(words[words.index("zerobench") :]) if "zerobench" in words else words[-1])
    if "zerobench" in words[: words.index("-m") + 2 if "-m" in words[1:] else 1]:
        return problem_of_arguments(words[words.index("zerobench") + 1 :])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return " ".join(word for word in words[1:] if "=" not in word and word not in targets)
    if words[0] in ("python", "python3"):
        exists = is_script(words[1]) or (words[1] == "-m" and importlib.util.find_spec(words[2]) is not None)
        return "" if exists else f"{words[1]}: no such script"
    return f"{words[0]}: no such command"


def is_script(name: str) -> bool:
    return name in OF_READERS or (ROOT / name).is_file()


def problem_of_arguments(words: list[str]) -> str:
    """Returns the problem of `zerobench WORDS`."""
    if words and words[0] in VERBS:
        problem = parsed(lambda: importlib.import_module("zerobench.cli")._run(words))
        rest = words[words.index("--") + 1 :] if "--" in words else words
        overrides = [w for w, before in zip(rest, ["", *rest], strict=False) if is_override(w) and before not in VALUED]
        return problem or problem_of_overrides(overrides, "-m" in words or words[0] in SWEEP_ANYWAY)
    flags, overrides, dirs = split_arguments(words)
    if "--help" in flags:
        return "; ".join(word for word in overrides if word.partition("=")[0] not in {*GROUPS, *KEYS})
    return "; ".join(unknown_flags(flags)) or problem_of_overrides(overrides, "-m" in flags, dirs)


def is_override(word: str) -> bool:
    return re.match(r"[a-z_.]+=", word) is not None


def problem_of_overrides(overrides: list[str], multirun: bool, dirs: list[Path] | None = None) -> str:
    try:
        check_line(make_composer(dirs) if dirs else shared_composer(), overrides, multirun, list(VERBS))
    except RefusedError as refused:
        return "; ".join(one for one in refused.problems if "Could not find 'hydra/" not in one)  # a plugin is an extra
    return ""


@cache
def shared_composer() -> Composer:
    """One that has composed what it was asked for before."""
    return make_composer([])


def parsed(run: Any) -> str:
    """Empty where argparse accepts it; what it says else."""
    try:
        run()
    except ParsedError:
        return ""
    except SystemExit as stop:
        return "" if stop.code == 0 else "argparse refuses it"
    return "it has parsed nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "what-is-where.md"], ids=name)
def test_every_command_on_a_page_parses(page: Path) -> None:
    assert {line: problem for line in line_tables(page) if (problem := problem_of(line))} == {}


PEERS = ("fsdp2", "fsdp2_no_reshard", "zero_redundancy")
"""Strategies that theory does not predict."""


@pytest.mark.slow
def test_every_block_of_every_page_is_that_of_the_committed_runs() -> None:
    # in a process of its own: other tests register models and strategies, which the references would list
    code = "from tools.docs.pages import outdated; print(*outdated())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == ([], 0), f"run `make pages`\n{done.stderr}"


def test_tables_on_the_first_pages_are_recorded_by_this_engine() -> None:
    assert not set(PROMINENT) & set(older()), (
        "results/reference/cpu/stages was recorded by an earlier engine; renew it:"
        ' make experiments plots EXPERIMENTS="stages"'
    )


@pytest.mark.slow
@pytest.mark.shown(4)
@pytest.mark.parametrize(
    "experiment",
    sorted(sorted({*FIGURES.values(), *(p.parent.name for p in REFERENCE.glob("*/runs.md"))}), key="stages".__ne__),
)
def test_every_experiment_has_committed_tables_that_say_where_they_come_from(experiment: str, capsys) -> None:
    results = zerobench.load(REFERENCE / experiment)
    assert set(results.runs.status) == {"ok"}
    assert all(f"experiment={experiment}" in command for command in results.runs.command)
    assert results.runs.commit.notna().all()
    assert results.runs.torch_version.notna().all()
    accounted = results.runs[results.runs.states_bytes.notna() & ~results.runs.strategy.isin(PEERS)]
    states = accounted.states_bytes / accounted.predicted_states_bytes
    assert ((states - 1).abs() < 0.01).all()
    predicted = accounted.predicted_volume_psi.to_list()  # to the element; a float's last bit is the sums' order
    assert accounted.volume_psi.to_list() == pytest.approx(predicted, rel=1e-12)
    table = REFERENCE / experiment / "runs.md"
    assert cli.run(["export", str(table.parent), "--latest", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == table.read_text(), "run `make reference`, or export it again"


def test_the_page_has_the_cells_of_today_and_figures_that_are_there() -> None:
    page, cells = notebook.PAGE.read_text(), json.loads(notebook.NOTEBOOK.read_text())["cells"]
    sources = [(one["cell_type"] == "code", "".join(one["source"]).strip()) for one in cells]
    assert [(kind == "code", text) for kind, text in notebook.sources_on(page)] == sources, "run `make notebook`"
    drawn = {one.stem for one in notebook.FIGURES.glob("*.png")}
    assert drawn == {"memory", "volume", "timeline", "losses"}
    assert all(f"({notebook.FIGURES.name}/{name}.png)" in page for name in drawn)


@pytest.mark.thorough
def test_the_notebook_runs_and_bears_out_what_it_says(tmp_path: Path) -> None:
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason="the extra [notebook] is not installed: pip install -e '.[notebook]'")
    executed = notebook.executed(notebook.read(notebook.NOTEBOOK), tmp_path)
    outputs = {  # by a cell's last line
        cell["source"].split("\n")[-1]: [output["data"] for output in cell["outputs"] if "data" in output]
        for cell in executed["cells"]
        if cell["cell_type"] == "code"
    }
    runs = zerobench.load(tmp_path / "results/runs/notebook").runs.set_index("strategy")
    assert all(f"{size / 2**20:.1f}" in outputs["results"][0]["text/html"] for size in runs.peak_bytes)
    assert all(any("image/png" in one for one in shown) for line, shown in outputs.items() if ".plot." in line)
    assert runs.max_optimizer_bytes["zero1"] / runs.max_optimizer_bytes["ddp"] == pytest.approx(0.5, abs=0.01)
    assert runs.max_gradients_bytes["zero2"] < 0.5 * runs.max_gradients_bytes["zero1"]
    assert runs.volume_psi["zero1"] == runs.volume_psi["zero2"] == runs.volume_psi["ddp"] == 2.0
    assert runs.volume_psi["zero3"] == pytest.approx(3.0, abs=0.1)
    assert runs.peak_bytes["zero3"] < runs.peak_bytes["ddp"]
