"""`make versions`: the same loops under several releases, steps marked; what cannot be measured is told."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from tests.made_up import run as made_up_run
from validation import releases
from validation.__main__ import main
from validation.releases import ProgramEnd, Release
from zerobench.results.folders import claim_folder, write_run

MIB = 2**20


def made_up(monkeypatch: pytest.MonkeyPatch, by_label: dict[str, dict[str, Any]]) -> None:
    """Has releases leave these figures, a list one per launch, or fail with the words of `says`."""

    launches = itertools.count()

    def measure(release: Release, loops: Sequence[str], world_size: int, runs: Path) -> ProgramEnd:
        values = dict(by_label[release.label])
        if "says" in values:
            return ProgramEnd(1, values["says"])
        for loop in loops:
            number = next(launches)
            mine = {name: one[number % len(one)] if isinstance(one, list) else one for name, one in values.items()}
            row = made_up_run("ddp", world_size, **(mine | {"model": loop}))
            write_run(claim_folder(runs, loop), loop, row, cell("ddp", world_size).config, {}, {})
        return ProgramEnd(0, "")

    monkeypatch.setattr(releases, "measure", measure)


def arguments(labels: Sequence[str], *more: str) -> list[str]:
    """A command line with this Python under several labels."""
    return ["versions", *(f"--python={sys.executable}={label}" for label in labels), *more]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_value_that_moved_is_marked_at_its_release(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    old = {"peak_bytes": 100 * MIB, "volume_psi": 2.0, "torch_version": "2.12.1"}
    made_up(monkeypatch, {
        "torch 2.11": {"says": "ImportError: no module"},
        "torch 2.12": old,
        "torch 2.13": old | {"peak_bytes": 134 * MIB, "torch_version": "2.13.0"},
        "nightly": old | {"peak_bytes": 134 * MIB, "volume_psi": 3.0, "torch_version": "2.14.0"},
    })  # fmt: skip
    labels = ["torch 2.11", "torch 2.12", "torch 2.13", "nightly"]
    assert main(arguments(labels, "--loops", "ddp,fsdp2")) == 1
    text = capsys.readouterr().out
    titles = "| | torch 2.11 | torch 2.12, torch 2.12.1 | torch 2.13, torch 2.13.0 | nightly, torch 2.14.0 |"
    assert text.count(titles) == 2
    assert text.count("| peak_bytes | – | 104,857,600 | **140,509,184 (+34.0 MiB)** | 140,509,184 |") == 2
    for loop in ("ddp", "fsdp2"):
        assert f"torch 2.11, {loop}: ImportError: no module" in text
    assert main(arguments(labels[1:], "--loops", "ddp")) == 0
    told = capsys.readouterr()
    text = told.out
    assert "| peak_bytes | 104,857,600 | **140,509,184 (+34.0 MiB)** | 140,509,184 |" in text
    assert "| volume_psi | 2 | 2 | **3 (+1)** |" in text
    assert "[3/3] nightly" in told.err
