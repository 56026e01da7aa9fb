"""A disk that fails is a sentence that names file, place and cause; no file is left, whoever was killed."""

import errno
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults import disk
from tests.faults.disk import opened
from zerobench.ranks.start_ranks import LaunchError, launch
from zerobench.zero.offload.disk import ALIGN_BYTES, DiskError, FileStore, Pool, Scratch, problems_of_path, sweep

BLOCK = 4 * ALIGN_BYTES


def zeros(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.uint8)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix == ".bin"]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_short_is_named(tmp_path: Path, direct: bool) -> None:
    with opened(tmp_path, BLOCK, direct=direct) as store:
        region = store.allocate(4 * BLOCK)
        region.write(zeros(4 * BLOCK)).wait()
        (file,) = files_in(tmp_path)
        os.truncate(file, 2 * BLOCK + 5000)
        region.read(zeros(2 * BLOCK)).wait()
        with pytest.raises(DiskError) as caught:
            region.read(zeros(BLOCK), 2 * BLOCK).wait()
        words = f"read of {BLOCK} bytes at {2 * BLOCK} ended after 5000; the file has {2 * BLOCK + 5000} bytes"
        assert str(caught.value) == f"{file}: {words}, of {4 * BLOCK} that were reserved"
        with pytest.raises(DiskError, match=f"{BLOCK} bytes at {3 * BLOCK} ended after 0"):
            region.read(zeros(BLOCK), 3 * BLOCK).wait()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (DiskError, str(caught.value))


def test_what_nobody_waited_for_is_raised_in_the_end(tmp_path: Path) -> None:
    """And a pool's buffer comes back from a read that failed; a region that was never written says so."""
    pool, store = Pool(BLOCK, 1), FileStore(tmp_path, BLOCK)
    region = store.allocate(BLOCK)
    with pytest.raises(DiskError, match="16384 bytes at 0 were never written"):
        region.read(zeros(BLOCK)).wait()
    region.write(zeros(BLOCK)).wait()
    os.truncate(files_in(tmp_path)[0], 0)
    buffer = pool.take()
    pool.give(buffer, after=region.read(buffer))
    pool.give(pool.take(timeout_s=20))
    with pytest.raises(DiskError, match="ended after 0"):
        store.drain()
    region.read(zeros(BLOCK))
    with pytest.raises(DiskError, match="ended after 0"):
        store.drain()
    store._end()
    assert files_in(tmp_path) == []


def test_a_disk_without_room_says_what_is_needed_and_free(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with opened(tmp_path, BLOCK) as store, pytest.raises(DiskError) as caught:
        store.allocate(2 * free)
    needed = -(-2 * free // ALIGN_BYTES) * ALIGN_BYTES
    assert f"grow of {needed} bytes at 0 failed: the disk is full: {needed} bytes are needed" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC


def test_what_could_not_be_reserved_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may reserve a part before it refuses; what is more than free is not even tried."""

    def half(fd: int, offset: int, nbytes: int) -> None:
        real(fd, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, "")

    real = os.posix_fallocate
    with opened(tmp_path, BLOCK) as store:
        store.allocate(BLOCK)
        monkeypatch.setattr(os, "posix_fallocate", half)
        with pytest.raises(DiskError, match="the disk is full: 65536 bytes are needed"):
            store.allocate(4 * BLOCK)
        assert files_in(tmp_path)[0].stat().st_size == store.channel.bytes == BLOCK
        monkeypatch.setattr(os, "posix_fallocate", None)
        with pytest.raises(DiskError, match="the disk is full"):
            store.allocate(2 * shutil.disk_usage(tmp_path).free)


def test_a_disk_that_fills_up_underneath(tmp_path: Path) -> None:
    """Space that was reserved stays ours; what a hole swallowed is reported by the write that finds no room."""
    with disk.mounted(tmp_path / "disk", "1m") as tiny_disk:
        with opened(tiny_disk, BLOCK, direct=False) as store:
            kept, holed = store.allocate(2**19), store.allocate(2**18)
            os.truncate(files_in(tiny_disk)[0], 2**19)
            (tiny_disk / "other").write_bytes(bytes(2**19 - ALIGN_BYTES))
            kept.write(zeros(2**19)).wait()
            with pytest.raises(DiskError, match=r"write of 16384 bytes at \d+ failed: the disk is full: 16384 bytes"):
                holed.write(zeros(2**18)).wait()
            kept.read(zeros(2**19)).wait()
        assert files_in(tiny_disk) == []
        assert problems_of_path(str(tiny_disk)) == []
        (tiny_disk / "rest").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
        (problem,) = problems_of_path(str(tiny_disk))
    full = "cannot be written to: No space left on device (0 bytes are free); name another folder"
    assert problem == f"{tiny_disk}: {full}"


def test_a_path_that_will_not_do_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert problems_of_path(str(tmp_path)) == []
    assert problems_of_path(f"{tmp_path}/no") == [f"{tmp_path}/no: there is no such folder; make it, or name another"]
    assert problems_of_path(f"{tmp_path}/file") == [f"{tmp_path}/file: is no folder; name one on the disk to be used"]
    (problem,) = problems_of_path("/proc")
    assert problem.startswith("/proc: cannot be written to: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_no_file_outlives_its_rank(tmp_path: Path) -> None:
    """Ranks are killed, or end well and close nothing; files of other processes stay."""
    mine = Scratch(tmp_path)
    jobs = [disk.DiskJob(rank, str(tmp_path)) for rank in range(2)]
    with pytest.raises(LaunchError, match=r"^crash: "):
        launch(disk.is_killed_while_writing, jobs, tmp_path / "logs", 60)
    assert list(tmp_path.glob("zerobench-*")) == [mine.path]
    results = launch(disk.leaves_files, jobs, tmp_path / "logs", 60)
    assert list(tmp_path.glob("zerobench-*")) == [mine.path]
    assert all(len(files) == 2 for files in results)
    mine._end()
    assert list(tmp_path.glob("zerobench-*")) == []


def test_a_users_folder_that_is_called_like_scratch_stays(tmp_path: Path) -> None:
    mine, left = (tmp_path / f"zerobench-scratch-{name}" for name in ("mine", "0123456789ab"))
    mine.mkdir()
    left.mkdir()
    assert sweep(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [mine]
