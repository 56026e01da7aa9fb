"""A budget check's findings for the terminal, for CI (JUnit XML), for people (Markdown) and for charts (JSON)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..host.terminal import stdout_console
from ..sizes import printable
from .judge import MORE_IS_BETTER, Finding, Limit, show_limit

STYLES = {"regression": "bold red", "missing": "bold red", "unjudged": "bold yellow", "improvement": "green"}
JUNIT_TAGS = {"regression": "failure", "missing": "failure", "unjudged": "error"}

Judged = list[tuple[str, str]]
"""(cell, metric) pairs that were checked."""


@dataclass
class Verdicts:
    """All that a check has found. `measured`: (cell, metric) -> limit and value."""

    findings: list[Finding] = field(default_factory=list)
    judged: Judged = field(default_factory=list)
    measured: dict[tuple[str, str], tuple[Limit, float]] = field(default_factory=dict)

    def add(self, other: Verdicts) -> None:
        """Takes in what another file's check has found."""
        self.findings += other.findings
        self.judged += other.judged
        self.measured |= other.measured

    @property
    def held(self) -> int:
        """Number of limits without a finding of their own or of their whole cell."""
        return _held(self.findings, self.judged)


def print_findings(findings: list[Finding], judged: Judged) -> None:
    """Prints a sentence per finding, and the number of limits that held."""
    console = stdout_console()
    for finding in findings:
        console.print(f"{finding.kind}: ", style=STYLES[finding.kind], end="")
        console.print(printable(finding.sentence), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{_held(findings, judged)} of {len(judged)} limits hold", highlight=False)
    if any(finding.kind == "improvement" for finding in findings):
        console.print("Improvements are not in the budget yet: zerobench budget record writes it again.")


def _held(findings: list[Finding], judged: Judged) -> int:
    """Counts limits without a finding of their own or of their whole cell."""
    found = {(finding.cell, finding.metric) for finding in findings}
    return sum((cell, metric) not in found and (cell, "") not in found for cell, metric in judged)


def write_junit(path: Path, findings: list[Finding], judged: Judged) -> None:
    """Writes a test case per limit; a finding without a metric is a case of its own."""
    worst_last = sorted(findings, key=lambda finding: finding.kind in JUNIT_TAGS)  # two files may judge one metric
    by_case = {(finding.cell, finding.metric): finding for finding in worst_last}
    suite = ElementTree.Element("testsuite", name="zerobench budget")
    for cell, metric in dict.fromkeys([*judged, *by_case]):
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(cell), name=metric or "the cell")
        finding = by_case.get((cell, metric))
        if finding is None:
            continue
        if finding.kind in JUNIT_TAGS:
            words = _xml(finding.sentence)
            ElementTree.SubElement(case, JUNIT_TAGS[finding.kind], message=words, type=finding.kind)
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(finding.sentence)
    for tag, attribute in (("failure", "failures"), ("error", "errors")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    suite.set("tests", str(len(suite)))
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """Returns a text without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def write_markdown(path: Path, findings: list[Finding], judged: Judged) -> None:
    """Writes a table of the findings under a line with their numbers."""
    lines = [f"**Budgets:** {_held(findings, judged)} of {len(judged)} limits hold.", ""]
    if findings:
        lines += ["| | what moved |", "| --- | --- |"]
        lines += [f"| {finding.kind} | {_one_line(finding.sentence)} |" for finding in findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _one_line(text: str) -> str:
    """Returns a text that cannot leave its cell of a Markdown table, nor be HTML in it."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def write_benchmark(path: Path, verdicts: Verdicts) -> None:
    """Writes the JSON that github-action-benchmark charts as customSmallerIsBetter: each measured metric of which less
    is better and which is not 0 throughout.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _unit(metric: str) -> str:
    return {"bytes": "B", "psi": "ψ", "s": "s"}.get(metric.rpartition("_")[2], "")
