"""Models of transformers in a fake world: attention without a mask, as in a run."""

import pytest

from zerobench.config.compose import compose_cells
from zerobench.fake_execution import Target, execute


@pytest.mark.slow
def test_a_sequence_per_row_needs_no_mask() -> None:
    """Flash attention, which takes none, says so where one is made."""
    pytest.importorskip("transformers")
    words = ["model=huggingface", "huggingface.architecture=llama", "huggingface.layers=1", "data=synthetic"]
    (one,) = compose_cells([*words, "backend=simulated", "world_size=2", "precision=bf16"])
    found = execute(one.config, target=Target("cuda", "flash"))
    assert not found.problem
