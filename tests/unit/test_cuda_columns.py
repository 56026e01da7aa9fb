"""Figures of CUDA's allocators, from torch's own names to the tables; torch.cuda is played, for
there need be no GPU.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cells import cell
from zerobench.probes import AccountedPass, TimedPass, allocator, energy, ledger, timed_pass
from zerobench.probes.energy import GpuState, Reading
from zerobench.records import ALLOCATOR
from zerobench.results import provenance

GPU = torch.device("cuda", 0)


class Played:
    """torch.cuda with an allocator that counts what the test allocates, under the keys of real statistics."""

    def __init__(self) -> None:
        self.now = {"allocated": 0, "reserved": 0, "split": 0}
        self.most = dict(self.now)
        self.started = False

    def use(self, allocated: int, reserved: int = 0) -> None:
        """`allocated` more bytes in blocks (fewer, if below 0), and `reserved` in segments."""
        self.now["allocated"] += allocated
        self.now["reserved"] += reserved
        self.most = {name: max(most, self.now[name]) for name, most in self.most.items()}

    def init(self) -> None:
        self.started = True

    def memory_stats(self) -> dict[str, int]:
        assert self.started
        peaks = {key: self.most[name] for name, key in allocator.PEAKS.items()}
        return {**peaks, "num_alloc_retries": 2, "num_ooms": 0}

    def reset_peak_memory_stats(self) -> None:
        self.most = dict(self.now)

    def max_memory_allocated(self) -> int:
        return self.most["allocated"]

    def host_memory_stats(self) -> dict[str, int]:
        return {
            "active_bytes.current": 0,
            "active_bytes.peak": 4096,
            "allocated_bytes.peak": 8192,
            "allocated_bytes.current": 6144,
            "num_host_alloc": 2,
        }

    def reset_peak_host_memory_stats(self) -> None:
        """The host's statistics stand still."""

    def mem_get_info(self) -> tuple[int, int]:
        return 700, 1000

    def current_device(self) -> int:
        return 0

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [
            segment(0, [(512, "active_allocated"), (1536, "inactive")]),
            segment(0, [(3072, "inactive"), (1024, "active_pending_free")]),
            segment(1, [(9999, "inactive")]),  # of a GPU that is another rank's
        ]


NAMES = [name for name, value in vars(Played).items() if callable(value) and not name.startswith("_") and name != "use"]
"""What the probes ask of torch.cuda."""


def test_what_the_allocator_was_told_is_on_record_and_makes_another_environment(monkeypatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(provenance, "device_class", lambda device: device)
    config = cell("zero2", 2).changed(device="cuda").config
    plain = provenance.environment_hash(config)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, f"expandable_segments:True {name}")
        assert provenance.alloc_conf("cuda") == f"expandable_segments:True {name}"
        assert provenance.environment_hash(config) != plain
    assert provenance.alloc_conf("cpu") is None


def segment(device: int, blocks: list[tuple[int, str]]) -> dict[str, Any]:
    parts = [{"address": 0, "size": size, "requested_size": size, "state": state} for size, state in blocks]
    total = sum(size for size, _ in blocks)
    used = {"allocated_size": 512, "active_size": 512, "requested_size": 512}
    return {"device": device, "address": 0, "total_size": total, **used, "stream": 0, "segment_type": "small",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": parts}  # fmt: skip


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    one = Played()
    for name in NAMES:
        monkeypatch.setattr(torch.cuda, name, getattr(one, name))
    return one


def test_the_names_are_torchs() -> None:
    """Functions exist in the installed torch; keys are in its documentation (a GPU would say more)."""
    for name in NAMES:
        assert callable(getattr(torch.cuda, name)), name
    said = torch.cuda.memory_stats.__doc__ or ""
    for key in allocator.PEAKS.values():
        assert f'"{key.split(".")[0]}.{{all,large_pool,small_pool}}.{{current,peak,allocated,freed}}"' in said, key
    assert '"num_alloc_retries"' in said
    host = torch.cuda.host_memory_stats.__doc__ or ""
    for key in ("active_bytes", "allocated_bytes"):
        assert f'"{key}.{{current,peak,allocated,freed}}"' in host


def test_a_torch_that_counts_freed_pinned_memory_is_not_asked_for_it(played: Played, monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130"))
    columns = allocator.process_memory(allocator.take_peaks())
    assert (columns["pinned_requested_bytes"], columns["pinned_bytes"]) == (None, 8192)


def test_the_accounted_pass_tells_phases_of_the_allocator_apart(played: Played, monkeypatch) -> None:
    """The ledger's bytes are those of real tensors, taken for CUDA's; the allocator's what is played around them."""
    kind = {True: "cuda", False: "cpu"}
    monkeypatch.setattr(ledger, "device_of", lambda storage: kind[storage.nbytes() >= 400])  # the rest is the host's
    with AccountedPass(GPU) as probe:
        with probe.phase("init"):
            played.use(2048, reserved=4096)
            kept = torch.zeros(250)
        for measured in (False, True, True):
            with probe.step(measured):
                with probe.phase("forward"):
                    played.use(1024)
                    made = [torch.zeros(100), torch.zeros(5)]
                with probe.phase("backward"):
                    played.use(+8192 if not measured else +3072, reserved=8192 * measured)
                    played.use(-8192 if not measured else -3072)
                with probe.phase("update"):
                    del made
                    played.use(-1024)
    rows = {(row.phase, row.category): row for row in probe.memory_rows(0) if row.tier == "device"}
    most = {key: row.max_bytes for key, row in rows.items()}
    phases = ("init", "forward", "backward", "update", "step")
    assert [most[phase, "allocated"] for phase in phases] == [2048, 3072, 6144, 3072, 6144]
    assert [most[phase, "reserved"] for phase in phases] == [4096, 12288, 20480, 20480, 20480]
    assert [most[phase, "outside_ledger"] for phase in phases] == [1048, 1672, 4744, 1672, 4744]
    assert [most[phase, "fragmentation"] for phase in phases] == [2048, 9216, 14336, 17408, 14336]
    assert {most[phase, "pinned"] for phase in phases} == {6144}
    assert {most[phase, "device_used"] for phase in phases} == {300}
    assert all(rows["step", name].at_peak_bytes is None for name in ALLOCATOR)
    assert most["step", "total"] == 1000 + 400  # the ledger's own total has neither more nor less
    host = [row for row in probe.memory_rows(0) if (row.tier, row.phase, row.category) == ("host", "step", "total")]
    assert [row.max_bytes for row in host] == [20]
    assert probe.memory["allocated_bytes"] == 6144  # of the measured steps, warm-up apart
    assert probe.memory["fragmentation_bytes"] == 20480 - 6144
    assert kept.numel() == 250


def test_the_timed_pass_reads_clocks_outside_its_steps(played: Played, monkeypatch) -> None:
    told: list[str] = []

    def state(device: torch.device) -> GpuState:
        told.append("read")
        played.use(50)  # what is taken before the measured steps is not theirs
        played.use(-50)
        return GpuState(1900 - told.count("read"), 1980, 40, 300.0, ())

    class Event(SimpleNamespace):
        def record(self) -> None:
            told.append("mark")

        def elapsed_time(self, _: "Event") -> float:
            return 5.0

    def joules(device: torch.device) -> dict[str, Reading]:
        told.append("joules")
        return {"GPU": Reading(1_000_000 * told.count("joules"))}

    monkeypatch.setattr(timed_pass, "read_state", state)
    monkeypatch.setattr(energy, "read_counters", joules)
    monkeypatch.setattr(energy, "SHORTEST_S", {"cuda": 0.0})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(timed_pass.dist, "barrier", lambda: told.append("meet"))
    with TimedPass(GPU) as probe:
        for measured in (False, True, True):
            with probe.step(measured), probe.phase("forward"):
                played.use(30)
                played.use(-30)
        assert not probe.may_wait
        probe.end_steps()
    step = ["mark", "mark", "mark", "mark"]
    assert told == [*step, "read", "meet", "wait", "joules", *step, *step, "mark", "wait", "joules", "read"]
    assert probe.results.energy_j == 1
    assert [one.sm_clock_mhz for one in probe.results.gpu_states] == [1899, 1898]
    assert probe.results.process_memory["allocated_bytes"] == 30
    assert probe.results.times[0] == {"forward": 0.005, "step": 0.005}
