"""Wrong command lines and files: one error message, at once, and exit code 2."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.end_to_end.command import SMALL
from tests.unit.test_status_show_prune import make
from zerobench import cli

HERE = ["world_size=1", *SMALL]


FORGED = "\nFORGED\x1b[2J"


@pytest.fixture(scope="module")
def of_a_stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose texts would print a line of their own, clear the screen, or be computed by a spreadsheet."""
    runs = tmp_path_factory.mktemp("runs")
    make(runs, "zero1", command=f"=HYPERLINK(1){FORGED}", processor="@a|b", model="pa$_$y{")
    make(runs, "zero2", status="crash", reason=f"lost{FORGED}", logs={"timed/rank0.log": "x\x1b[2J"})
    return runs


@pytest.mark.shown(4)
@pytest.mark.parametrize("verb", [
    "status", "show zero1 --results", "show zero2 --results", "export", "export --format latex",
    "export --format markdown --columns command,reason", "compare --format markdown {}", "compare {}",
])  # fmt: skip
def test_texts_of_runs_neither_forge_a_line_nor_control_the_terminal(verb: str, of_a_stranger: Path, capsys) -> None:
    assert cli.run([*verb.format(of_a_stranger).split(), str(of_a_stranger)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "\x1b" in line or line.lstrip(" -|").startswith("FORGED")]
    table = list(csv.reader(lines)) if verb == "export" else []
    assert not [cell for row in table for cell in row if cell.startswith(("=", "@"))]


FED = {
    "plan": ["--device-memory {} --gpus 2", "--device-memory 1GiB --gpus {}", "--device-memory 1GiB --gpus 2 model={}"],
    "estimate": ["model={}", "model=mlp --figure {}"],
    "predict": ["--cluster {}", "--cluster dgx2-v100 model={}"],
    "status": ["{}", "RUNS --where {}", "RUNS --columns {}"],
    "show": ["{}", "zero1 --results {}", "{} --results RUNS"],
    "compare": ["{} RUNS", "RUNS RUNS --noise {}", "RUNS RUNS --out {}"],
    "report": ["{}", "RUNS --out {}", "RUNS --out {}.html"],
    "plot": ["{} --out a.png", "memory {} --out a.png", "memory RUNS --out {}", "memory RUNS --out x{}.svg"],
    "replay": ["{}", "RUNS --worlds {}"],
    "export": ["{}", "RUNS --out {}.csv", "RUNS --format {}", "RUNS --format parquet --out {}"],
    "budget": ["{}", "check {}", "check --runs {}", "record --runs RUNS --file {}.yaml"],
    "noise": ["{}", "show --noise {}", "record model={}"],
    "calibrate": ["--sizes {}", "--out {} --sizes 0,0"],
    "prune": ["{}", "RUNS --dry-run --{}"],
}
"""Verb -> its words, with {} for a text from outside and RUNS for a folder of a stranger."""


@pytest.mark.shown(15)
@pytest.mark.parametrize("verb", cli.VERBS)
@pytest.mark.parametrize("text", [FORGED, "a" * 7000], ids=["forged", "long"])
def test_a_text_from_outside_stays_on_its_line_in_every_verb(
    verb: str, text: str, of_a_stranger: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in FED[verb]:
        with suppress(SystemExit):  # of its parser
            cli.run([verb, *(word.replace("RUNS", str(of_a_stranger)).replace("{}", text) for word in line.split())])
        shown = capsys.readouterr()
        told = shown.out + shown.err
        assert "\x1b" not in told, line
        assert "Traceback" not in told, line
        assert not [one for one in told.splitlines() if one.lstrip(" -|").startswith("FORGED")], line
        assert max(map(len, told.splitlines()), default=0) < 2500, line


MARKUP = "<img src=http://x.example/a> ![i](http://x.example/b) [l](javascript:c) `d` @someone **e**"


def test_markdown_of_a_stranger_has_no_html_image_link_or_mention(tmp_path: Path, capsys) -> None:
    for strategy, step in (("zero1", 0.25), ("zero2", 0.5)):
        make(tmp_path, strategy, command=MARKUP, model=MARKUP, step_s=step)
    runs = str(tmp_path)
    assert cli.run(["export", runs, "--format", "markdown", "--columns", "command,model"]) == 0
    assert cli.run(["compare", runs, runs, "--format", "markdown"]) == 0
    told = capsys.readouterr().out
    assert "someone" in told
    assert not re.findall(r"<(?!/?sub)|(?<!\\)[\[\]`*!]|@|://", told)


FILES = {
    "about a list": b"environments: {any: {about: [1], cells: {}}}",
    "a config folder": b"command: [--config-dir, /tmp, experiment=x]\n",
    "a short flag": b"command: [-cd, /tmp]\n",
    "a folder": b"command: [results_dir=/etc]\n",
    "python": b"command: !!python/object/apply:os.system [x]\n",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_budget_file_is_refused_in_a_sentence(kind: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "budget.yaml"
    path.write_bytes(FILES[kind])
    assert cli.run(["budget", "check", str(path)]) == 125, "no verdict, for git bisect"
    shown = capsys.readouterr()
    assert "budget.yaml" in shown.out + shown.err
    assert "Traceback" not in shown.out + shown.err
    assert max(map(len, (shown.out + shown.err).splitlines())) < 2500
    assert [one.name for one in tmp_path.iterdir()] == ["budget.yaml"], "nothing was run"


@pytest.mark.parametrize(("value", "said"), [
    ("${oc.decode:1}", "seed: `oc.decode` can only take strings"), ("${oc.env:NOPE}", "variable 'NOPE' not found"),
    ("${oc.env:SEED}", ""), ("${oc.dict.keys:seed}", "without end"),
])  # fmt: skip
def test_a_value_of_the_command_lines_own_is_resolved_or_refused_in_a_sentence(
    value: str, said: str, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("SEED", "3")
    before = OmegaConf.create({"seed": "${oc.env:SEED}"})
    cli.run([f"seed={value}", *HERE[:2], "--dry-run"])
    told = capsys.readouterr()
    assert said in told.out + told.err
    assert "Error" not in told.out + told.err
    assert ("1 to run" in told.out) is (not said)
    assert before.seed == "3", "a caller's own configs are as before"


def temporary_folders(where: Path) -> list[str]:
    return [path.name for path in where.iterdir() if "zerobench" in path.name]


@pytest.mark.thorough
def test_a_signal_while_composing_leaves_nothing_and_the_next_sweeps_what_a_kill_left(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "zerobench", "-m", "seed=range(0,500)", *HERE, "--dry-run"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for sent in (signal.SIGTERM, signal.SIGKILL):
        command = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 300
            while not temporary_folders(tmp_path):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            command.send_signal(sent)
            _, told = command.communicate(timeout=300)
        finally:
            command.kill()
        assert command.returncode == (130 if sent == signal.SIGTERM else -signal.SIGKILL)
        assert b"Traceback" not in told
        assert len(temporary_folders(tmp_path)) == (sent == signal.SIGKILL)
    done = subprocess.run([*words[:4], "seed=1,2", *HERE, "--dry-run"], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    assert temporary_folders(tmp_path) == []


@pytest.mark.thorough
def test_a_reader_that_leaves_disturbs_nobody(tmp_path: Path) -> None:
    """`| head`: the command comes to its own end, with its own exit code and without a word."""
    for words, code in (("--help", 0), ("status nowhere", 2), ("-m seed=1,2 " + " ".join(HERE) + " --dry-run", 0)):
        line = f"'{sys.executable}' -m zerobench {words} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == str(code)
        assert "Broken" not in done.stderr
        line = f"'{sys.executable}' -m zerobench {words} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.stdout.strip(), done.stderr) == (str(code), "")
