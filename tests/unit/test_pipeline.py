"""An update over files is a pipeline: the next cut is being read, and the last one written, while one is updated.

The disk is held up on purpose: whoever waited for it where the pipeline must not would wait for good.
"""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import zerobench
from zerobench.zero import NvmeOffload
from zerobench.zero.offload.disk import Channel, DiskError
from zerobench.zero.offload.nvme import MASTER

CUTS, BLOCK = 5, 4096
PATIENCE_S = 20.0


class HeldUp:
    """A disk that writes a cut's masters only once the next cut has been updated; and what it was asked for so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masters: dict[int, int] = {}  # offset in the file -> cut
        self.reads: set[int] = set()
        self.updated = 0
        self.held = 0
        self._changed = threading.Condition()
        self._read, self._write = Channel.read, Channel.write
        monkeypatch.setattr(Channel, "read", lambda channel, *a: self.read(channel, *a))
        monkeypatch.setattr(Channel, "write", lambda channel, *a: self.write(channel, *a))

    def read(self, channel: Channel, piece: memoryview, offset: int, name: str) -> None:
        self.note(lambda: self.reads.add(self.masters.get(offset, -1)))
        self._read(channel, piece, offset, name)

    def write(self, channel: Channel, piece: memoryview, offset: int, name: str) -> None:
        cut = self.masters.get(offset, CUTS)
        if cut < CUTS - 1:
            self.held += 1
            if not self.wait_for(lambda: self.updated >= cut + 2):
                raise DiskError(f"nobody updated cut {cut + 1} while cut {cut} was to be written")
        self._write(channel, piece, offset, name)

    def update(self) -> None:
        """A cut is about to be updated."""
        following = self.updated + 1
        if self.masters and following < CUTS:
            assert self.wait_for(lambda: following in self.reads), f"the reading of cut {following} has not begun"
        self.note(lambda: setattr(self, "updated", following))

    def note(self, change) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def wait_for(self, met) -> bool:
        with self._changed:
            return self._changed.wait_for(met, PATIENCE_S)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("buffers", [12, 16])
def test_reads_and_writes_go_on_while_a_cut_is_updated(
    buffers: int, gradients: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldUp(monkeypatch)
    model = nn.Linear(CUTS * BLOCK // 4, 1, bias=False)

    class Told(torch.optim.AdamW):  # hooks run once a step, however many cuts there are
        def step(self, closure=None):
            disk.update()
            return super().step(closure)

    optimizer = Told(model.parameters(), fused=True)
    files = NvmeOffload(path=str(tmp_path), block_bytes=BLOCK, buffers=buffers, gradients=gradients)
    engine = zerobench.initialize(model, optimizer, strategy="zero1", offload=files, elementwise=True)
    for step in range(3):
        engine.backward(engine(torch.ones(1, CUTS * BLOCK // 4)).sum())
        if step == 2:  # masters and states are there
            runs = engine.placement.ranges[engine.units[0]]
            assert len(runs) == CUTS
            disk.masters = {run.paged[MASTER]._regions[cut].offset: cut for cut, run in enumerate(runs)}
            disk.reads.clear()
        disk.updated = 0
        engine.step()
    assert disk.updated == CUTS
    assert disk.held == CUTS - 1
