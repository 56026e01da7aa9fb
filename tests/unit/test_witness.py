"""The allocator's own total: the hook against tensors of known sizes, and the profiler without it."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zerobench.probes import AccountedPass, allocator

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def hook() -> Iterator[allocator.AllocatorHook]:
    """The hook; garbage that earlier tests have left is not given back while bytes are counted."""
    found = allocator.install_hook()
    if found is None:
        pytest.skip("no C++ compiler here")
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    allocator.install_hook.cache_clear()
    yield
    allocator.install_hook.cache_clear()


def of_step(probe: AccountedPass) -> dict[str, int]:
    return {row.category: row.max_bytes for row in probe.memory_rows(0) if (row.phase, row.tier) == ("step", "device")}


@pytest.mark.slow
def test_the_hook_counts_to_the_byte_in_every_thread(hook: allocator.AllocatorHook) -> None:
    before = hook.live_bytes()
    hook.take_peak()
    kept = torch.empty(1001, dtype=torch.uint8)
    kept.untyped_storage().resize_(5003)

    def elsewhere() -> None:
        torch.zeros(3 * MIB, dtype=torch.uint8)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert hook.live_bytes() == before + 5003
    assert hook.take_peak() == before + 5003 + 3 * MIB
    assert hook.take_peak() == before + 5003  # it counts again
    del kept
    assert hook.live_bytes() == before


@pytest.mark.slow
def test_what_a_thread_makes_is_seen_and_named_by_it(hook: allocator.AllocatorHook) -> None:
    """4 MiB that a thread keeps."""
    kept: list[torch.Tensor] = []
    with AccountedPass(CPU) as probe, probe.step(True), probe.phase("forward"):
        mine = torch.zeros(MIB, dtype=torch.uint8)
        thread = threading.Thread(name="planted", target=lambda: kept.append(torch.zeros(4 * MIB, dtype=torch.uint8)))
        thread.start()
        thread.join()
    found = of_step(probe)
    assert probe.witness == "hook"
    assert found["total"] == found["allocated"] == 5 * MIB
    assert found["temporary"] == 4 * MIB
    assert found["outside_ledger"] == 0  # a thread of Python's has a relay
    assert next((row.bytes, row.module) for row in probe.tensor_rows(0)) == (4 * MIB, "thread planted")
    assert mine.numel() + kept[0].numel() == 5 * MIB


@pytest.mark.parametrize(
    "spoilt", ["a file that is no library", "a cache that cannot be made", "a compiler that fails"]
)
def test_no_run_fails_for_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    if spoilt == "a cache that cannot be made":
        monkeypatch.setenv("XDG_CACHE_HOME", str(failing))
    elif spoilt == "a compiler that fails":
        monkeypatch.setenv("CXX", str(failing))
    else:
        monkeypatch.setattr(allocator, "hook_library", lambda: failing)
    allocator.install_hook.cache_clear()
    try:
        assert allocator.take_allocated(CPU)[0] == "none"
    finally:
        allocator.install_hook.cache_clear()
    assert not list(tmp_path.glob("**/.compiling-*"))
