"""The table fits the terminal: a narrow one loses columns, never digits."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.cells import cell
from zerobench import console
from zerobench.cell import _blank_row


def rows() -> list[dict]:
    ok = asdict(_blank_row(cell("zero2", 2)))
    figures = {"peak_bytes": 255036216, "states_bytes": 175085872, "predicted_states_bytes": 175079728}
    ok |= figures | {"volume_psi": 2.0, "predicted_volume_psi": 2.0, "step_s": 0.3521, "step_s_low": 0.3462}
    ok |= {"status": "ok", "step_s_high": 0.3687, "tokens_per_s": 2909.0, "loss_last": 2.8601}
    other = asdict(_blank_row(cell("zero1", 2)))
    return [ok, {**other, "status": "crash", "reason": "timed pass: rank 1 was killed"}]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_table_of_any_width_shows_whole_figures(width: int, monkeypatch, capsys) -> None:
    plain = console.Console
    monkeypatch.setattr(console, "Console", lambda **_: plain(force_terminal=True, width=width, no_color=True))
    console.print_results(rows())
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.index("zero1") < shown.index("zero2"), "sorted"
    assert "243.2" in shown
    assert "352.1" in shown
    assert ("2.8601" in shown) == (width > 100)
    assert "zero1 tiny N=2 b=8: crash: timed pass: rank 1 was killed" in shown
