"""A budget check's findings for the terminal, for CI (JUnit XML), for people (Markdown) and for charts (JSON)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..host.terminal import print_on, stdout_console
from ..results.grid import Grid
from .judge import MORE_IS_BETTER, Finding, Limit, show_limit

STYLES = {"regression": "bold red", "missing": "bold red", "unjudged": "bold yellow", "improvement": "green"}
JUNIT_TAGS = {"regression": "failure", "missing": "failure", "unjudged": "error"}


@dataclass
class Verdicts:
    """All findings of a check. `judged`: (cell, metric); `measured`: (cell, metric) -> limit and value."""

    findings: list[Finding] = field(default_factory=list)
    judged: list[tuple[str, str]] = field(default_factory=list)
    measured: dict[tuple[str, str], tuple[Limit, float]] = field(default_factory=dict)

    def add(self, other: Verdicts) -> None:
        """Adds the findings of another file's check."""
        self.findings += other.findings
        self.judged += other.judged
        self.measured |= other.measured

    @property
    def held(self) -> int:
        """Number of limits without a finding of their own or of their whole cell."""
        found = {(finding.cell, finding.metric) for finding in self.findings}
        return sum((cell, metric) not in found and (cell, "") not in found for cell, metric in self.judged)

    @property
    def words(self) -> str:
        """The number of limits that hold."""
        return f"{self.held} of {len(self.judged)} limits hold"


def print_findings(verdicts: Verdicts) -> None:
    """Prints a message per finding, and the number of limits that hold."""
    console = stdout_console()
    for finding in verdicts.findings:
        console.print(finding.kind, style=STYLES[finding.kind], end=": ")
        print_on(console, finding.sentence)
    console.print(verdicts.words, highlight=False)
    if any(finding.kind == "improvement" for finding in verdicts.findings):
        console.print("Improvements are not in the budget yet: zerobench budget record writes it again.")


def write(path: Path, text: str) -> None:
    """Writes a report, creating its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_junit(path: Path, verdicts: Verdicts) -> None:
    """Writes a test case per limit; a finding without a metric is a case of its own."""
    worst_last = sorted(
        verdicts.findings, key=lambda finding: finding.kind in JUNIT_TAGS
    )  # two files may judge one metric
    by_case = {(finding.cell, finding.metric): finding for finding in worst_last}
    suite = ElementTree.Element("testsuite", name="zerobench budget")
    for cell, metric in dict.fromkeys([*verdicts.judged, *by_case]):
        case = ElementTree.SubElement(suite, "testcase", classname=one_line(cell), name=metric or "the cell")
        finding = by_case.get((cell, metric))
        if finding is None:
            continue
        if finding.kind in JUNIT_TAGS:
            words = one_line(finding.sentence)
            ElementTree.SubElement(case, JUNIT_TAGS[finding.kind], message=words, type=finding.kind)
        else:
            ElementTree.SubElement(case, "system-out").text = one_line(finding.sentence)
    for tag, attribute in (("failure", "failures"), ("error", "errors")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    suite.set("tests", str(len(suite)))
    text = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True).decode()
    write(path, text)


def one_line(text: str) -> str:
    """Replaces line breaks and other control characters, which XML cannot contain, by spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


def write_markdown(path: Path, verdicts: Verdicts) -> None:
    """Writes a table of the findings below a line with their number."""
    table = Grid(["", "what moved"], [[one.kind, one.sentence] for one in verdicts.findings]).markdown(sides=False)
    write(path, f"**Budgets:** {verdicts.words}.\n\n{table if verdicts.findings else ''}")


def write_benchmark(path: Path, verdicts: Verdicts) -> None:
    """Writes the JSON that github-action-benchmark charts as customSmallerIsBetter: each measured metric where smaller
    is better and that is not 0 in both limit and value.
    """
    rows = []
    sentences = {(one.cell, one.metric): one.sentence for one in verdicts.findings}
    for (cell, metric), (limit, value) in verdicts.measured.items():
        if metric in MORE_IS_BETTER or not (value or limit.value):
            continue
        row: dict[str, Any] = {
            "name": f"{cell}: {metric}",
            "unit": _unit(metric),
            "value": int(value) if value.is_integer() else value,
        }
        if limit.tolerance:
            row["range"] = f"± {limit.tolerance * 100:g} %"
        rows.append({**row, "extra": sentences.get((cell, metric), f"limit: {show_limit(metric, limit)}")})
    write(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def _unit(metric: str) -> str:
    return {"bytes": "B", "psi": "ψ", "s": "s"}.get(metric.rpartition("_")[2], "")
