"""The table for a paper: what is in it, and that LaTeX can read it whatever runs are called."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_up import MIB, results_of, run
from zerobench import cli
from zerobench.commands.export.table import escaped, to_latex
from zerobench.results.tables import collect

HOSTILE = r"50%_off #1 & $x^2$ {a}\b ~[c] <i>" + "\nψ × é"


def rows_of(text: str) -> list[list[str]]:
    """The cells of the rows between the lines of booktabs."""
    return [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in text.splitlines() if line.endswith(r"\\")]


def problems(text: str) -> list[str]:
    """Reasons why LaTeX would stumble: a sign of its own that is not escaped, braces, rows of unequal length."""
    found = [f"not ASCII: {sign!r}" for sign in text if not sign.isascii()]
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\.", "", body)
    found += [f"bare {sign}" for sign in "#%~" if sign in bare]
    depth = 0
    for sign in bare:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        found += ["a brace too many"] * (depth < 0)
    found += ["an open brace"] * (depth != 0)
    found += ["an open formula"] * (bare.count("$") % 2)
    outside = "".join(bare.split("$")[::2])
    found += [f"bare {sign} outside of a formula" for sign in "_^" if sign in outside]
    (columns,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", body)
    found += [f"{len(row)} cells of {len(columns)}: {row}" for row in rows_of(body) if len(row) != len(columns)]
    order = [body.find(rf"\{word}") for word in ("begin", "toprule", "midrule", "bottomrule", "end")]
    return found + ["lines out of order"] * (order != sorted(order) or -1 in order)


@pytest.mark.slow
def test_numbers_have_units_and_intervals_and_failures_a_word() -> None:
    rows = [run("ddp", 2, repeat=n, step=step) for n, step in enumerate((0.1, 0.1, 0.1))]
    rows += [run("zero1", 2, step_s_low=None, step_s_high=None, peak_bytes=5 * MIB), run("zero3", 2, "oom")]
    text = to_latex(results_of(rows), "runs", "cell,peak_bytes,step_s,volume_psi,tokens_per_s,world_size")
    assert problems(text) == []
    head, units, ddp, zero1, zero3 = rows_of(text)
    assert head == ["cell", "peak", "step", "volume", "tokens", "world size"]
    assert units == ["", "(MiB)", "(ms)", r"($\psi$)", "(tokens / s)", "(ranks)"]
    assert ddp == ["ddp tiny N=2 b=4", "36.0", "100 [100, 100]", "3.000", "1280 [1280, 1280]", "2"]
    assert zero1[:3] == ["zero1 tiny N=2 b=4", "5.000", "100"]
    assert zero3[:3] == ["zero3 tiny N=2 b=4", r"\textit{oom}", "--"]
    assert text.splitlines()[0] == r"% \usepackage{booktabs}"


def test_usual_columns_are_those_that_say_something() -> None:
    text = to_latex(results_of([run("ddp", 2), run("zero1", 2, "crash")]), "runs", None)
    head, _, ddp, zero1 = rows_of(text)
    assert head[:3] == ["cell", "peak", "states"]
    assert "nvme" not in head
    assert len(ddp) == len(head)
    assert zero1 == ["zero1 tiny N=2 b=4", r"\textit{crash}", *["--"] * (len(head) - 2)]
    assert problems(text) == []


def test_what_runs_are_called_reaches_no_command_of_latex() -> None:
    rows = [replace(run("ddp", 2), model=HOSTILE, device_class="cpu\n\\input{/etc/passwd}")]
    text = to_latex(results_of(rows), "runs", "model,strategy,peak_bytes")
    assert problems(text) == []
    assert rows_of(text)[2][0].startswith(r"50\%\_off \#1 \& \$x\textasciicircum{}2\$ \{a\}\textbackslash{}b ")
    assert not any(line.startswith(r"\input") for line in text.splitlines())
    assert escaped("[a]") == "{[}a]", "an option of the row's end"


@pytest.mark.slow
def test_the_verb_writes_it_and_names_a_column_that_is_none(tmp_path: Path, capsys) -> None:
    collect(results_of([run("ddp", 2), run("zero1", 2)]), tmp_path / "runs")
    out = tmp_path / "runs.tex"
    assert cli.run(["export", str(tmp_path / "runs"), "--format", "latex", "--out", str(out)]) == 0
    assert problems(out.read_text()) == []
    assert capsys.readouterr().out == f"{out}: the table runs of {tmp_path / 'runs'} as latex\n"
    assert cli.run(["export", str(tmp_path / "runs"), "--format", "latex", "--table", "memory"]) == 0
    assert problems(capsys.readouterr().out) == []
    assert cli.run(["export", str(tmp_path / "runs"), "--format", "latex", "--columns", "peek"]) == 2
    assert "--columns: peek is no column of runs; zerobench columns --table runs lists them" in capsys.readouterr().err
