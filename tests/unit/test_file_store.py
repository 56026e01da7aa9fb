"""Tensors in files: what is read is what was written, whatever the size, order, block or kind of I/O.

An update over files is a pipeline: the next cut is being read, and the last one written, while one is updated.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zerobench
from tests.faults.disk import opened
from zerobench.zero import NvmeOffload, labels
from zerobench.zero.offload.disk import ALIGN_BYTES, Channel, DiskError, Pool
from zerobench.zero.offload.nvme import MASTER

BLOCK = 4 * ALIGN_BYTES


class Heard(labels.Observer):
    """Listeners' notices of files."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        self._files: dict[tuple[str, str, str], int] = {}

    @property
    def files(self) -> Counter[str]:
        """Bytes by category."""
        sizes: Counter[str] = Counter()
        for (_, _, category), size in self._files.items():
            sizes[category] += size
        return sizes

    def on_file(self, path: str, name: str, category: str, size: int) -> None:
        self._files[path, name, category] = size

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        self.moved[kind] += size


@pytest.fixture
def heard() -> Iterator[Heard]:
    one = Heard()
    labels.listen(one)
    yield one
    labels.unlisten(one)


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_any_size_comes_back(tmp_path: Path, direct: bool, aligned: bool) -> None:
    """Unaligned lengths, unaligned memory; what lies behind the tensor in memory stays as it was."""
    begin = 0 if aligned else 4
    with opened(tmp_path, BLOCK, depth=3, direct=direct) as store:
        if store.channel.direct is not direct:
            pytest.skip("the disk of the temporary folder takes no direct I/O")
        pool = Pool(5 * BLOCK, 2)
        for nbytes in (0, 4, 4092, 4096, 4100, BLOCK - 4, BLOCK, BLOCK + 4, 4 * BLOCK + 4096, 4 * BLOCK + 8):
            there, back = (pool.take() for _ in range(2))
            values = noise(nbytes, nbytes)
            there[begin : begin + nbytes].copy_(values)
            back.fill_(7)
            region = store.allocate(nbytes)
            region.write(there[begin : begin + nbytes]).wait()
            region.read(back[begin : begin + nbytes]).wait()
            assert torch.equal(back[begin : begin + nbytes], values)
            assert (back[begin + nbytes :] == 7).all()
            assert (back[:begin] == 7).all()
            pool.give(there)
            pool.give(back)
        assert pool.taken == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("direct", "most"), [(True, ALIGN_BYTES), (False, 1000)])
def test_short_transfers_are_continued(tmp_path: Path, monkeypatch, direct: bool, most: int) -> None:
    """The system may move less than it was asked for, and is asked again for the rest."""

    def at_most(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, parts, offset: call(fd, [parts[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", at_most(os.preadv))
    monkeypatch.setattr(os, "pwritev", at_most(os.pwritev))
    with opened(tmp_path, BLOCK, direct=direct) as store:
        region, values = store.allocate(BLOCK + 4), noise(BLOCK + 4)
        into = torch.zeros_like(values)
        region.write(values)
        region.read(into).wait()
        assert torch.equal(into, values)


@pytest.mark.parametrize("direct", [True, False])
def test_many_regions_in_random_order_equal_memory(tmp_path: Path, direct: bool) -> None:
    """Reads and writes of blocks, many under way, against a dict of tensors; a read sees the write before it."""
    draw = random.Random(1)
    with opened(tmp_path, BLOCK, depth=5, direct=direct) as store:
        sizes = [draw.randrange(1, 6 * BLOCK) for _ in range(12)]
        regions = [store.allocate(size) for size in sizes]
        model = [noise(size, n) for n, size in enumerate(sizes)]
        for region, values in zip(regions, model, strict=True):
            region.write(values.clone())
        reads = []
        for turn in range(600):
            which = draw.randrange(len(sizes))
            first = draw.randrange(0, -(-sizes[which] // BLOCK))
            begin, end = first * BLOCK, min(sizes[which], (first + draw.randrange(1, 4)) * BLOCK)
            if draw.random() < 0.5:
                values = noise(end - begin, turn)
                model[which][begin:end] = values
                regions[which].write(values, begin)
            else:
                into = torch.empty(end - begin, dtype=torch.uint8)
                reads.append((regions[which].read(into, begin), into, model[which][begin:end].clone()))
        for handle, into, expected in reads:
            handle.wait()
            assert torch.equal(into, expected)


def test_bytes_are_told_and_are_the_kernels(tmp_path: Path, heard: Heard) -> None:
    def kernel() -> tuple[int, int]:
        told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(told["read_bytes"]), int(told["write_bytes"])

    with opened(tmp_path, BLOCK) as store:
        region = store.allocate(10 * BLOCK + 5, labels.MASTER, "w")
        values = noise(region.nbytes)
        assert heard.files == {labels.MASTER: 10 * BLOCK + 5}
        read, written = kernel()
        region.write(values).wait()
        for _ in range(3):
            region.read(values).wait()
        assert heard.moved == {"write": 10 * BLOCK + ALIGN_BYTES, "read": 3 * (10 * BLOCK + ALIGN_BYTES)}
        if not store.channel.direct:
            pytest.skip("what the page cache reads and writes, and when, is the kernel's choice")
        assert kernel()[0] - read == heard.moved["read"]
        own = 16 * ALIGN_BYTES  # the file system writes about the file, too
        assert heard.moved["write"] <= kernel()[1] - written <= heard.moved["write"] + own
        assert store.channel.bytes == 10 * BLOCK + ALIGN_BYTES


def test_a_pool_gives_aligned_buffers_and_waits_for_one() -> None:
    pool = Pool(5000, 3)
    assert pool.buffer_bytes == 2 * ALIGN_BYTES
    buffers = [pool.take() for _ in range(3)]
    assert all(buffer.data_ptr() % ALIGN_BYTES == 0 for buffer in buffers)
    assert pool.taken == 3
    with pytest.raises(TimeoutError, match="all 3 buffers of the pool were taken"):
        pool.take(timeout_s=0.05)
    threading.Timer(0.05, pool.give, [buffers[1]]).start()
    assert pool.take() is buffers[1]
    pool.give(buffers[0])


CUTS, CUT_BYTES = 5, 4096
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
    model = nn.Linear(CUTS * CUT_BYTES // 4, 1, bias=False)

    class Told(torch.optim.AdamW):  # hooks run once a step, however many cuts there are
        def step(self, closure=None):
            disk.update()
            return super().step(closure)

    optimizer = Told(model.parameters(), fused=True)
    files = NvmeOffload(path=str(tmp_path), block_bytes=CUT_BYTES, buffers=buffers, gradients=gradients)
    engine = zerobench.initialize(model, optimizer, strategy="zero1", offload=files, elementwise=True)
    for step in range(3):
        engine.backward(engine(torch.ones(1, CUTS * CUT_BYTES // 4)).sum())
        if step == 2:  # masters and states are there
            runs = engine.placement.ranges[engine.units[0]]
            assert len(runs) == CUTS
            disk.masters = {run.paged[MASTER]._regions[cut].offset: cut for cut, run in enumerate(runs)}
            disk.reads.clear()
        disk.updated = 0
        engine.step()
    assert disk.updated == CUTS
    assert disk.held == CUTS - 1
