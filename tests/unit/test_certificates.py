"""The corpus of loops whose certificates are counted: its tables, classes of certificates, and some honest loops."""

from collections import Counter
from pathlib import Path

import pytest

from validation.certificates.command import Work, loops, run_one, summary
from validation.certificates.judged import CertificateOfLoop, judged
from validation.certificates.loops import Plant, plant, usual
from zerobench.records import CertificateRow

HANDFUL = ("four micro-batches", "lora", "muon beside adamw", "tied", "zero2")
PLANTED = plant(usual(), causes="masters.*bfloat16", about="dtypes: masters")


def row(verdict: str, subject: str = "masters of all 6 parameters", found: str = "bfloat16") -> CertificateRow:
    return CertificateRow("dtypes", subject, found, "float32", "it is declared", verdict)


def class_of(*rows: CertificateRow, planted: Plant | None = PLANTED) -> tuple[str, str]:
    found = judged("a loop", 1, "", rows, 0, planted)
    return found.kind, found.named_by


def test_each_reference_is_an_honest_loop_of_one_process() -> None:
    table = loops()
    for name, loop in table.items():
        if loop.reference:
            reference = table[loop.reference]
            assert (reference.ranks, isinstance(reference, Plant)) == (1, False), name
        if isinstance(loop, Plant):
            assert loop.reference, name
            assert loop.causes, name
            assert loop.about, name


def test_the_corpus_has_a_hundred_honest_loops_and_sixty_failures() -> None:
    counts = Counter((isinstance(loop, Plant), loop.ranks) for loop in loops().values())
    assert counts[False, 1] + counts[False, 2] >= 100
    assert counts[True, 1] + counts[True, 2] >= 60
    assert min(counts.values()) >= 30


def test_certificates_get_their_classes() -> None:
    beside = row("different", "moments of all 6 parameters", "float64")
    assert class_of(row("different"), beside) == ("named", "different")
    assert class_of(row("unusual"), beside) == ("named", "unusual")
    assert class_of(beside) == ("misnamed", "")
    assert class_of(row("cannot be told")) == ("cannot be told", "")
    assert class_of(row("same")) == class_of() == ("missed", "")
    assert judged("a loop", 1, "", [row("same")], 0, PLANTED).wrongly_same.startswith("dtypes: masters of all 6")
    assert not judged("a loop", 1, "", [row("different")], 0, PLANTED).wrongly_same
    assert [class_of(*rows, planted=None)[0] for rows in ([], [row("unusual")], [row("unusual"), beside])] == [
        "clean", "unusual", "accused",
    ]  # fmt: skip


def test_the_summary_counts_runs_with_and_without_references() -> None:
    def of(kind: str, reference: str = "", named_by: str = "", same: str = "") -> CertificateOfLoop:
        return CertificateOfLoop("a loop", 1, reference, kind, named_by, same, 0, 0, 0, 0, "", 0)

    honest = [of("clean"), of("accused"), of("crashed"), of("clean", "plain")]
    planted = [of("named", named_by="unusual"), of("missed", same="a row"), of("named", "plain", "different")]
    counts = summary(honest, planted)
    assert [one.runs for one in counts] == [3, 1, 2, 1]
    assert (counts[0].clean, counts[0].different, counts[0].failed) == (1, 1, 1)
    assert (counts[2].unusual, counts[2].missed, counts[2].wrongly_same, counts[3].different) == (1, 1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", HANDFUL)
def test_an_honest_loop_is_accused_of_nothing(name: str, tmp_path: Path) -> None:
    found = run_one(Work(name), 11, tmp_path)
    assert (found.kind, found.rows) == ("clean", "")
    if reference := loops()[name].reference:
        assert run_one(Work(reference), 11, tmp_path).kind == "clean"
        found = run_one(Work(name, reference), 11, tmp_path)
        assert (found.kind, found.rows) == ("clean", "")
        assert found.same > 5


def test_a_loop_that_raises_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("validation.certificates.honest.adamw", None)
    found = run_one(Work("two losses"), 11, tmp_path)
    assert (found.kind, found.rows) == ("crashed", "TypeError: 'NoneType' object is not callable")
