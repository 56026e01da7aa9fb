"""The formulas in a run's account: equations, numbers, what is in flight, the replay's and the measured bytes."""

from dataclasses import asdict
from typing import Any

import pandas as pd
import pytest

from zerobench.commands.account import traffic_lines
from zerobench.commands.account_memory import table_of_formulas
from zerobench.records import MemoryRow
from zerobench.theory.closed_forms import Formula, Term, from_json, to_json

FORMULAS = {
    "gradients": Formula("2ψ/N", 1000, {"ψ": 1000, "N": 2}, (Term("padding", 124), Term("idle", -100))),
    "communication": Formula("0", 0, {}),
    "states": Formula("2ψ + (2 + K)ψ/N", 9000, {"ψ": 1000, "N": 2, "K": 12.0}, (Term("padding", 24),)),
    "volume": Formula("(r + 1)ψ", 4000, {"ψ": 1000, "r": 3}, (Term("padding", 30),)),
}


def row(text: Any) -> dict[str, Any]:
    return {"formulas": text, "psi": 1000}


def memory() -> pd.DataFrame:
    sizes = {"gradients": 1024, "communication": 0, "states": 9016, "total": 9999}
    rows = [MemoryRow(rank, "step", c, 0, 0, size - 8 * rank, size) for c, size in sizes.items() for rank in (0, 1)]
    return pd.DataFrame(map(asdict, rows))


def test_each_category_has_its_equation_and_its_bytes() -> None:
    table, lines = table_of_formulas(row(to_json(FORMULAS)), memory())
    gradients, communication, states = table.rows
    assert gradients == ["gradients", "2ψ/N", "1000 B", "24 B", "1.0 KiB", "1.0 KiB"]
    assert communication[:2] == ["communication", "0"]
    assert states[1] == "2ψ + (2 + K)ψ/N"
    assert lines[0].startswith("ψ = 1,000 trained parameters, N = 2 ranks that share the states, K = 12 bytes")
    assert lines[1:] == ["in flight, gradients: padding 124 B, idle -100 B"]


def test_the_volume_is_in_psi() -> None:
    assert traffic_lines(row(to_json(FORMULAS))) == [
        "formula (r + 1)ψ = 4.000 ψ, with r = 3 reductions of a gradient",
        "besides: padding +0.030 ψ",
    ]


def test_bytes_between_nodes_stand_beside_their_formula() -> None:
    formulas = {"between nodes": Formula("1.5ψ(Z − 1)/N", 1536, {"ψ": 4096, "Z": 2, "N": 4})}
    assert traffic_lines(row(to_json(formulas))) == ["between nodes by formula 1.5ψ(Z − 1)/N = 1.5 KiB"]


@pytest.mark.parametrize("text", [None, float("nan")])
def test_a_run_without_formulas_has_none(text: Any) -> None:
    assert table_of_formulas(row(text), memory()) == (None, [])
    assert traffic_lines(row(text)) == []


DAMAGED = ("", '{"states": 3}', '{"volume": {"equation": "ψ", "value": 1, "numbers": {}, "beyond": [1]}}')


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_formulas_are_a_sentence(text: str) -> None:
    table, (line,) = table_of_formulas(row(text), memory())
    assert table is None
    assert line.startswith("formulas cannot be read: ")
    assert traffic_lines(row(text)) == []


def test_formulas_survive_the_table() -> None:
    assert from_json(to_json(FORMULAS)) == FORMULAS
