"""The peers' settings: what null becomes, what is missing is one sentence before ranks start, and no prediction."""

from dataclasses import asdict, replace

import pytest

from tests.cells import cell
from zerobench.config.flat import base_name, name_cells
from zerobench.predict.estimate import estimate
from zerobench.results import printed_table
from zerobench.strategies import predicts, registration, specs
from zerobench.sweep.cell import run_cell

PEERS = {name: spec for name, spec in specs().items() if spec.tuning}

OPTIONAL = {"reshard_ranks"}
"""Options that may stay null in a resolved cell."""


@pytest.mark.parametrize("name", sorted(PEERS))
def test_null_follows_tuned_and_a_value_stands(name: str) -> None:
    spec = PEERS[name]
    section = asdict(spec.options())
    assert {key for key, value in section.items() if value is None} - OPTIONAL == set(spec.tuning)
    plain, best = (spec.filled({**section, "tuned": tuned}) for tuned in (False, True))
    assert {key for key, value in plain.items() if value is None} <= OPTIONAL
    assert plain != {**best, "tuned": False}
    key, (default, _) = next(iter(spec.tuning.items()))
    assert spec.filled({**section, "tuned": True, key: default})[key] == default


def test_ours_have_nothing_to_fill_in() -> None:
    for name in set(specs()) - set(PEERS):
        section = asdict(specs()[name].options())
        assert specs()[name].filled(section) == section
        assert predicts({"name": name})


def test_what_is_tuned_is_in_the_cell_and_in_its_name() -> None:
    plain, best = cell("fsdp2", 2), cell("fsdp2", 2, tuned=True)
    assert (plain.config.strategy.prefetch, best.config.strategy.prefetch) == (0, 1)
    assert plain.cell_id != best.cell_id
    assert base_name(best.config) == base_name(plain.config) + " tuned"
    assert name_cells([plain.config, best.config]) == ["fsdp2 tiny N=2 b=8", "fsdp2 tiny N=2 b=8 tuned"]


def test_what_is_not_installed_is_said_before_ranks_start(tmp_path, monkeypatch) -> None:
    lacking = replace(specs()["zero2"], requires="no_such_module", install="pip install it")
    monkeypatch.setitem(registration._SPECS, "zero2", lacking)
    one = cell("zero2", 2, results_dir=str(tmp_path))
    row = run_cell(one, lambda _: None)
    assert row.status == "invalid"
    assert row.reason.startswith("strategy=zero2: needs no_such_module, which is not installed")
    assert "pip install" in row.reason


def test_deepspeed_is_not_asked_to_clip() -> None:
    (problem,) = [p for p in cell("deepspeed_zero1", 2, clip=1.0).problems if "installed" not in p]
    assert problem == "clip=1: strategy=deepspeed_zero1 clips inside its own step, unseen; leave it out"


def test_a_peer_has_no_prediction_and_its_places_hold_a_dash(monkeypatch, capsys) -> None:
    one = cell("fsdp2", 2)
    assert estimate(one.config).psi > 0
    assert estimate(one.config).states_bytes is estimate(one.config).volume_psi is None
    from zerobench.sweep.cell import _blank_row

    row = asdict(_blank_row(one)) | {"status": "ok", "peak_bytes": 2**24, "states_bytes": 2**23, "volume_psi": 2.9}
    row |= {"step_s": 0.1, "step_s_low": 0.09, "step_s_high": 0.11, "tokens_per_s": 100.0, "loss_last": 2.5}
    printed_table.print_results([row])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fsdp2" in line]
    assert line.split()[4:11] == ["ok", "16.0", "8.000", "–", "–", "2.900", "–"]
