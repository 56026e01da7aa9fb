"""DTensor's questions about shapes, inside of a fake world."""

from __future__ import annotations

from tests.cells import cell
from zerobench.fake.observers import Growth, IntervalMark, listening
from zerobench.fake_execution import execute
from zerobench.predict.build import build_model


class _Updates:
    """Storages that appear while an optimizer updates."""

    def __init__(self) -> None:
        self.phase = ""
        self.largest_bytes = 0

    def hear(self, heard: Growth | IntervalMark) -> None:
        if isinstance(heard, Growth):
            if self.phase == "update":
                self.largest_bytes = max(self.largest_bytes, heard.grown)
        elif heard.what == "phase":
            self.phase = heard.name


def test_whole_tensors_that_dtensor_asks_about_are_not_counted() -> None:
    """In the first update as in later ones nothing is larger than a shard's state."""
    updates, n = _Updates(), 8
    with listening(updates.hear):
        found = execute(cell("fsdp2", n, backend="simulated", tensors="fake").config)
    assert not found.problem
    largest_numel = max(parameter.numel() for parameter in build_model(found.config).parameters())
    assert updates.largest_bytes == 4 * largest_numel // n
