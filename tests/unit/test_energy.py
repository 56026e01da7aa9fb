"""Energy counters and a GPU's state, from a folder and a library that play RAPL and NVML; and the price of a million
tokens.
"""

import csv
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.probes import energy
from zerobench.probes.energy import EnergyMeter, GpuState, read_energy_mj, read_packages, read_state

RANGE = 1_000_000
CPU = torch.device("cpu")


def set_rapl(folder: Path, *packages: int, dram: int = 30) -> None:
    """Two packages, the memory of one, and domains that are no part of the sum."""
    counters = [(f"intel-rapl:{number}", f"package-{number}", used) for number, used in enumerate(packages)]
    counters += [("intel-rapl:1:0", "dram", dram), ("intel-rapl:0:0", "core", 999), ("intel-rapl:2", "psys", 999)]
    for name, title, used in counters:
        (folder / name).mkdir(exist_ok=True)
        for file, value in (("name", title), ("energy_uj", used), ("max_energy_range_uj", RANGE)):
            (folder / name / file).write_text(f"{value}\n")


@pytest.fixture
def rapl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "SHORTEST_S", {"cpu": 0.0, "cuda": 0.0})
    set_rapl(tmp_path, 100, 200)
    return tmp_path


def begun(device: torch.device = CPU) -> EnergyMeter:
    meter = EnergyMeter(device)
    meter.begin()
    return meter


def test_packages_and_their_memory_count_and_a_counter_that_began_again(rapl: Path) -> None:
    assert [reading.energy_uj for reading in read_packages().values()] == [100, 200, 30]
    meter = begun()
    set_rapl(rapl, 1100, 50, dram=40)  # package 1 passed its range
    assert meter.end() == pytest.approx((1000 + (RANGE - 150) + 10) / 1e6)


def test_without_every_counter_or_in_too_short_a_time_there_is_no_energy(rapl: Path, monkeypatch) -> None:
    meter = begun()
    monkeypatch.setattr(energy, "SHORTEST_S", {"cpu": 60.0})
    assert meter.end() is None
    monkeypatch.setattr(energy, "SHORTEST_S", {"cpu": 0.0})
    assert meter.end() == 0
    (rapl / "intel-rapl:1:0" / "energy_uj").unlink()
    assert (meter.end(), begun().end(), read_packages()) == (None, None, {})


class Nvml:
    """NVML with one GPU. `codes`: errors of init, handle and energy. Other arguments are the figures that it has."""

    def __init__(self, millijoules: int, init: int = 0, handle: int = 0, energy: int = 0, **figures: int) -> None:
        self.millijoules, self.asked = millijoules, list[Any]()
        self.codes = {"init": init, "handle": handle, "energy": energy}
        self.nvmlDeviceGetHandleByIndex_v2 = self.nvmlDeviceGetHandleByUUID = self.handle_of
        for figure, value in figures.items():
            setattr(self, f"nvmlDeviceGet{figure}", partial(self.report, value))

    def report(self, value: int, handle: Any, *arguments: Any) -> int:
        assert handle.value == 7
        arguments[-1]._obj.value = value
        return 0

    def nvmlInit_v2(self) -> int:
        return self.codes["init"]

    def handle_of(self, name: Any, handle: Any) -> int:
        self.asked.append(getattr(name, "value", name))
        handle._obj.value = 7
        return self.codes["handle"]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:
        assert handle.value == 7
        energy._obj.value = self.millijoules
        return self.codes["energy"]


def test_a_gpu_is_asked_by_its_uuid_and_answers_in_millijoules(rapl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml(2**40)
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="8a5b"))
    meter = begun(torch.device("cuda", 0))
    library.millijoules += 12_500
    assert meter.end() == pytest.approx(12.5)
    assert (read_energy_mj("3"), library.asked) == (2**40 + 12_500, [b"GPU-8a5b", b"GPU-8a5b", 3])
    library.millijoules = 5  # the driver was loaded again
    assert meter.end() is None
    old = SimpleNamespace(nvmlInit_v2=lambda: 0)
    for other in (Nvml(1, init=3), Nvml(1, handle=3), Nvml(1, energy=3), old):
        monkeypatch.setattr(energy.ctypes, "CDLL", lambda name, other=other: other)
        assert read_energy_mj("GPU-8a5b") is None
    monkeypatch.undo()
    assert read_energy_mj("no such GPU") is None, "also without a driver"


def test_a_price_becomes_dollars_per_million_tokens_in_the_tables(tmp_path: Path, capsys) -> None:
    """At 2.50 dollars per GPU hour: two ranks, 2,048 tokens/s together, and the interval of the step."""
    make(tmp_path, tokens_per_s=2048.0, step_s=0.25, step_s_low=0.2, step_s_high=0.3, energy_j=64.0, tokens_per_j=32.0)
    assert cli.run(["export", str(tmp_path), "--price", "2.50"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    dollars = 2.5 * 2 / 3600 / 2048 * 1e6
    ends = {"": dollars, "_low": dollars * 0.8, "_high": dollars * 1.2}
    assert {end: float(row[f"dollars_per_mtokens{end}"]) for end in ends} == pytest.approx(ends)
    assert cli.run(["export", str(tmp_path), "--price", "2.50", "--format", "latex"]) == 0
    assert "0.678 [0.543, 0.814]" in capsys.readouterr().out
    assert cli.run(["export", str(tmp_path), "--price", "2.50", "--format", "markdown"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert header.endswith("| tokens_per_s | tokens_per_j | loss_last | dollars_per_mtokens |")
    out = tmp_path / "page.html"
    assert cli.run(["report", str(tmp_path), "--out", str(out), "--price", "2.50"]) == 0
    assert "0.678 (0.543–0.814)" in out.read_text()
    assert cli.run(["report", str(tmp_path), "--out", str(out)]) == 0
    assert "$/M tokens" not in out.read_text()
    assert cli.run(["show", "zero2", "--results", str(tmp_path)]) == 0
    assert "energy 64.0 J in the measured steps, 32 tokens/J" in capsys.readouterr().out
    assert cli.run(["-m", "strategy=ddp", "--price", "free"]) == 2
    assert "--price: 'free' must be dollars per GPU hour" in capsys.readouterr().err


def test_nvml_reports_clocks_temperature_power_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="8a5b"))

    def state(**figures: int) -> GpuState | None:
        monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Nvml(0, **figures))
        return read_state(torch.device("cuda", 1))

    every = {"ClockInfo": 1755, "MaxClockInfo": 1980, "Temperature": 61, "PowerUsage": 688_440}
    assert state(**every, CurrentClocksThrottleReasons=0x4) == GpuState(1755, 1980, 61, 688.44, ("power cap",))
    idle = state(**every, CurrentClocksThrottleReasons=0x1)
    assert idle is not None
    assert idle.throttle == ()
    reasons = ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown")
    assert state(ClockInfo=300, CurrentClocksThrottleReasons=0x68) == GpuState(300, None, None, None, reasons)
    assert state(**every) == GpuState(1755, 1980, 61, 688.44, None)
    assert state() is None
    monkeypatch.undo()
    assert energy.read_figure("no such GPU", "Temperature", energy.CORE_TEMPERATURE) is None, "also without a driver"
