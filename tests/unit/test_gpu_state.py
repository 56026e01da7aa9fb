"""nvidia-smi's words about a GPU, from a script that plays it; and which GPU it is asked about."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerobench.probes import nvidia_smi
from zerobench.probes.nvidia_smi import GpuState, name_of, parse, read_state

UUID = "8a5b5a4e-0c8b-4a55-9d6a-1f6b1f0e7c11"


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID))


def test_a_line_becomes_a_state() -> None:
    assert parse("1755, 1980, 61, 688.44, 0x0000000000000004\n") == GpuState(1755, 1980, 61, 688.44, ("power cap",))
    assert parse("1980, 1980, 33, 120.00, 0x0000000000000001") == GpuState(1980, 1980, 33, 120.0, ())  # idle: not held
    slowed = parse("300, 1980, 91, [N/A], 0x0000000000000068")
    words = ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown")
    assert slowed == GpuState(300, 1980, 91, None, words)
    assert parse("1755, 1980, 61, 688.44, [N/A]") == GpuState(1755, 1980, 61, 688.44, None)
    assert parse("No devices were found") is None


def test_the_gpu_is_asked_for_by_its_uuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    play(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/asked; echo "1755, 1980, 61, 688.44, 0x0"')
    assert read_state(torch.device("cuda", 1)) == GpuState(1755, 1980, 61, 688.44, ())
    assert f"--id=GPU-{UUID} --query-gpu=clocks.sm," in (tmp_path / "asked").read_text()


def test_without_a_uuid_the_visible_devices_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3, GPU-{UUID}")
    assert [name_of(0), name_of(1), name_of(2)] == ["3", f"GPU-{UUID}", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert name_of(1) == "1"


def test_an_older_driver_has_another_name_for_the_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'case "$2" in *clocks_event_reasons*) exit 2;; esac; echo "1410, 1410, 50, 300.00, 0x0000000000000080"'
    play(monkeypatch, tmp_path, script)
    assert read_state(torch.device("cuda", 0)) == GpuState(1410, 1410, 50, 300.0, ("power brake",))


def test_a_program_that_is_missing_late_or_fails_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, tmp_path, "echo broken; exit 9")
    assert read_state(torch.device("cuda", 0)) is None
    monkeypatch.setattr(nvidia_smi, "TIMEOUT_S", 0.05)
    play(monkeypatch, tmp_path, "exec sleep 5")
    assert read_state(torch.device("cuda", 0)) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert read_state(torch.device("cuda", 0)) is None
