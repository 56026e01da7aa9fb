"""Tables on the first pages are those of today's engine."""

import pytest

from analysis.__main__ import UNTIMED
from tools.docs import recorded
from zerobench.config.compose import compose_cells
from zerobench.config.world import has_times


@pytest.mark.parametrize("experiment", recorded.PROMINENT)
def test_a_table_on_the_first_pages_is_recorded_by_this_engine(experiment: str) -> None:
    there = (recorded.REFERENCE / experiment / recorded.CODE).read_text().strip()
    assert there == recorded.engine_code(), (
        f"results/reference/cpu/{experiment} was recorded by an earlier engine; renew it:"
        f' make experiments plots EXPERIMENTS="{" ".join(recorded.PROMINENT)}"'
    )


LOSSES_ALONE = ("losses", "delayed", "low_bit")


@pytest.mark.shown(6)
@pytest.mark.parametrize("experiment", UNTIMED)
def test_an_experiment_that_runs_beside_another_has_no_times_that_anybody_reads(experiment: str) -> None:
    cells = compose_cells([f"experiment={experiment}"])
    assert experiment in LOSSES_ALONE or not any(has_times(cell.config) for cell in cells)


def test_words_are_no_code() -> None:
    code = 'def f():\n    """Says."""\n    x = 1  # one\n\n    # two\n    return x\n'
    assert recorded.code_of(code) == "def f():\n    x = 1  # one\n    return x"
    assert recorded.code_of(code.replace("Says", "Tells")) == recorded.code_of(code)
    assert recorded.code_of(code.replace("1", "2")) != recorded.code_of(code)
