"""Lines of code in budgets: kept short without a loss, matched between two measurements, named in sentences."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from zerobench.budgets.budget_file import BudgetFile, CellBudget, Environment, read_budget, write_budget
from zerobench.budgets.judge import Limit, judge_cell
from zerobench.budgets.lines import (
    Line,
    LineTable,
    MovedLine,
    fold,
    line_tables,
    moved_lines,
    ordered,
    parse_lines,
    plain,
    unfold,
)
from zerobench.probes.intervals import rows_by_line

MIB = 2**20


def line(number: int, size: int, module: str = "blocks.3", **more: Any) -> Line:
    values: dict[str, Any] = {"category": "activations", "file": "model.py", "function": "Block.forward", "name": ""}
    values |= more
    source = f"{values['file']}:{number} in {values['function']}"
    return Line(values["category"], module, source, size, 1, values["name"])


def table(*lines: Line, rest: int = 0, rest_most: int = 0) -> LineTable:
    return LineTable(ordered(lines), rest, rest_most)


def shown(moved: list[MovedLine]) -> list[tuple[str, int, int]]:
    return [(one.source, one.before, one.after) for one in moved]


def shortened(lines: LineTable, most: int = 40) -> LineTable:
    """The table as it comes back from a budget file."""
    return parse_lines(plain({"peak": lines}, most))["peak"]


def random_table(seed: int, number: int = 60) -> LineTable:
    draw = random.Random(seed)
    rows = {}
    for _ in range(number):
        module = draw.choice(["", "head", "blocks.{}", "blocks.{}.mlp", "layers.{}.experts.{}.w1"])
        module = module.format(draw.randrange(4), draw.randrange(3))
        name = draw.choice(["", "weight", f"{module}.weight"])
        one = line(draw.randrange(20), draw.choice([4, 512, MIB]), module, function=draw.choice("fg"), name=name)
        rows[one.category, one.module, one.source] = one
    return table(*rows.values())


@pytest.mark.parametrize("seed", range(20))
def test_equal_modules_fold_to_one_row_and_come_back(seed: int) -> None:
    lines = random_table(seed)
    assert unfold(fold(lines.lines)) == lines.lines
    assert sum(one.bytes for one in fold(lines.lines)) == lines.bytes
    assert shortened(lines).bytes == lines.bytes, "the sum stays exact"


def test_folded_lines_keep_who_keeps_the_last_of_their_own() -> None:
    lines = [replace(line(1, MIB, f"blocks.{n}"), kept_by=f"model.blocks.{n}.cache") for n in (0, 1, 2, 5, 6)]
    kept_by = {folded.module: folded.kept_by for folded in fold(lines)}
    assert kept_by == {"blocks.0–2": "model.blocks.2.cache", "blocks.5–6": "model.blocks.6.cache"}


@pytest.mark.parametrize("seed", range(30))
def test_differences_add_up_whatever_has_moved(seed: int) -> None:
    draw = random.Random(1000 + seed)
    before = random_table(seed)
    kept = [one for one in before.lines if draw.random() < 0.8]
    changed = [replace(one, bytes=one.bytes * draw.choice([1, 1, 1, 2])) for one in kept]
    after = table(*changed, *random_table(seed + 500, 5).lines)
    most = draw.choice([3, 10, 40])
    for one, other in ((before, after), (shortened(before, most), after), (before, shortened(after, most))):
        assert sum(moved.difference for moved in moved_lines(one, other)) == other.bytes - one.bytes
        assert moved_lines(one, one) == []
    assert moved_lines(shortened(before, most), before) == [], "what the rest may hold has not moved"


@pytest.mark.parametrize("new", [30, 32, 35])
def test_new_line_among_equal_ones_is_named_by_shift_of_its_function(new: int) -> None:
    """Before: lines 30 and 32, with as many bytes; then a line above and a new line, which is new."""
    before = table(line(30, MIB), line(32, MIB), line(33, 512, "head"))
    after = table(*(line(n, MIB) for n in (31, 33, new)), line(34, 512, "head"))
    assert shown(moved_lines(before, after)) == [(f"model.py:{new} in Block.forward", 0, MIB)]
    assert shown(moved_lines(after, before)) == [(f"model.py:{new} in Block.forward", MIB, 0)]


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        ([line(30, 2 * MIB)], [("model.py:30 in Block.forward", MIB, 2 * MIB)]),
        ([line(33, MIB), line(34, 12 * MIB, name="logits")], [("model.py:34 in Block.forward", 0, 12 * MIB)]),
        ([line(29, 12 * MIB), line(31, MIB)], [("model.py:29 in Block.forward", 0, 12 * MIB)]),
        ([], [("model.py:30 in Block.forward", MIB, 0)]),
        ([line(5, MIB, file="layers/block.py")], []),
        ([line(5, 3 * MIB, file="layers/block.py")], [("layers/block.py:5 in Block.forward", MIB, 3 * MIB)]),
        ([line(30, MIB, name="renamed")], []),
        (
            [line(30, MIB, category="communication")],
            [("model.py:30 in Block.forward", MIB, 0), ("model.py:30 in Block.forward", 0, MIB)],
        ),
    ],
)
def test_the_line_that_moved_is_found(after: list[Line], moved: list[tuple[str, int, int]]) -> None:
    assert sorted(shown(moved_lines(table(line(30, MIB)), table(*after))), key=lambda one: -one[1]) == moved


def test_of_parameters_those_that_grew_are_named() -> None:
    """No line made them within the watch, and no module."""

    def parameters(wide: int) -> LineTable:
        storages = [
            (size, SimpleNamespace(module="", source="", name=name, shown_shape=""), "parameters")
            for name, size in [("emb.weight", 512_000), ("head.weight", 512_000)]
            + [(f"blocks.{n}.{part}", size) for n in range(3) for part, size in
               (("up.weight", 512 * wide), ("up.bias", 4 * wide), ("down.weight", 512 * wide), ("down.bias", 512))]
        ]  # fmt: skip
        rows = [{"run_id": "a"} | vars(one) for one in rows_by_line(0, "peak", storages)]
        return line_tables(pd.DataFrame(rows))["peak"]

    before, after = parameters(256), parameters(320)
    short = parse_lines(plain({"peak": before}))["peak"]
    assert len(plain({"peak": before})["peak"]) == 6, "blocks are folded"
    for was in (before, short):
        (moved,) = moved_lines(was, after)
        assert moved.sentence == "no line of Python: +192.8 KiB (blocks.0–2.down.weight and blocks.0–2.up.weight)"


def test_sentences_name_the_line_through_the_file(tmp_path: Path) -> None:
    """As `record` writes the lines and `check` reads them; a file without them is judged without."""
    limits = {"peak_bytes": Limit(12.0 * MIB), "max_activations_bytes": Limit(12.0 * MIB), "growth_bytes": Limit(0.0)}
    before = {"peak": table(line(30, 12 * MIB)), "growth": table()}
    path = tmp_path / "b.yaml"
    cells = {"c": CellBudget("0", limits, before), "old": CellBudget("0", limits)}
    write_budget(BudgetFile(path, [], {"cpu": Environment({}, cells)}))
    assert "- [12582912, 1, activations, blocks.3, 'model.py:30 in Block.forward', '']\n" in path.read_text()
    read = read_budget(path).environments["cpu"].cells
    assert read == cells
    after = {
        "peak": table(line(30, 12 * MIB), line(31, 12 * MIB, name="logits")),
        "growth": table(line(40, 64, category="inputs")),
    }
    row = {"status": "ok", "peak_bytes": 24 * MIB, "max_activations_bytes": 24 * MIB, "growth_bytes": 64}
    found = {f.metric: f for f in judge_cell("c", limits, {**row, "lines": after}, read["c"].lines)}
    assert found["peak_bytes"].sentence.endswith(
        "; activations moved most: 12,582,912 B (12.0 MiB) before, 25,165,824 B (24.0 MiB) now"
        "; model.py:31 in Block.forward: +12.0 MiB (blocks.3, logits)"
    )
    assert [(line.file, line.line) for line in found["peak_bytes"].code_lines] == [("model.py", 31)]
    assert found["growth_bytes"].sentence.endswith(" moved most; model.py:40 in Block.forward: +64 B (blocks.3)")
    assert len(found) == 3
    for one in judge_cell("old", limits, {**row, "lines": after}, read["old"].lines):
        assert one.code_lines == ()
        assert "model.py" not in one.sentence


def test_a_ceiling_names_what_grew_since_or_what_is_largest() -> None:
    limits = {"peak_bytes": Limit(20.0 * MIB, "<=")}
    after = {"peak": table(line(30, 20 * MIB), line(31, 4 * MIB))}
    row = {"status": "ok", "peak_bytes": 24 * MIB, "lines": after}
    (found,) = judge_cell("c", limits, row)
    assert found.sentence.endswith(
        "; model.py:30 in Block.forward: 20.0 MiB (blocks.3); model.py:31 in Block.forward: 4.0 MiB (blocks.3)"
    )
    (found,) = judge_cell("c", limits, row, {"peak": table(line(30, 20 * MIB))})
    assert [(line.line, line.sentence[-22:]) for line in found.code_lines] == [(31, "ward: +4.0 MiB (blocks.3)"[-22:])]
    elsewhere = row | {"max_activations_bytes": 24 * MIB, "peak_activations_bytes": 4 * MIB}
    (found,) = judge_cell("c", {"max_activations_bytes": Limit(20.0 * MIB, "<=")}, elsewhere)
    assert "of 20,971,520 B (20.0 MiB); 4.0 MiB at the overall peak, where lines are recorded;" in found.sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "it is a mapping with peak and growth"),
        ({"top": []}, "it is a mapping with peak and growth"),
        ({"peak": 3}, "lines: peak is 3; it is a list"),
        ({"peak": [[1, 2]]}, "a row is bytes, storages, category, module, line and label"),
        ({"peak": [["1", 1, "a", "b", "c", ""]]}, "a row is bytes"),
        ({"peak": [[7, 2, "a", "b.0–1", "c", ""]]}, "do not divide 7 bytes equally"),
        ({"peak": [[0, 0, "a", "b.0–999999.0–999999", "c", ""]]}, "is no range of modules"),
        ({"peak": [[0, 0, "a", "b.0–9999.0–9999", "c", ""]]}, "more than 100,000"),
        ({"peak": [[0, 0, "a", "b.9–3", "c", ""]]}, "is no range of modules"),
    ],
)
def test_wrong_lines_of_a_file_get_a_sentence(content: Any, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_lines(content)
    assert words in str(error.value)
