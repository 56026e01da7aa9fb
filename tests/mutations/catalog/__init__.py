"""Mutants of the engine, the probes and the theory, and the faults that tests plant by themselves."""

from __future__ import annotations

from ..mutant import Mutant, PlantedByTest
from . import comm, engine, measuring, memory, predicting, saving, updating

MUTANTS: tuple[Mutant, ...] = (
    *engine.MUTANTS, *updating.MUTANTS, *comm.MUTANTS, *memory.MUTANTS, *saving.MUTANTS, *measuring.MUTANTS,
    *predicting.MUTANTS,
)  # fmt: skip


PLANTED_BY_TESTS = {
    "a rank's gradients lost, gradients doubled, those of some parameters doubled": (
        "tests/distributed/test_training_check.py::test_planted_faults_of_training_are_named"
    ),
    "a closed form that is divided wrongly, halved or doubled": (
        "tests/unit/test_formulas.py::test_a_wrong_formula_is_seen"
    ),
    "an allocation of the schedule that the replay leaves out": (
        "tests/distributed/test_random_models.py::test_an_allocation_that_the_replay_forgets_is_seen"
    ),
    "a loss that is no number": "tests/distributed/test_training_check.py::test_a_loss_that_is_lost_is_a_status",
    "buffers that are used before their collective is done": (
        "tests/distributed/test_races.py::test_planted_races_are_seen"
    ),
    "streams that do not wait for one another": "tests/distributed/test_lanes.py::test_planted_races_are_seen",
    "stamps that are read too early": "tests/distributed/test_lanes.py::test_stamps_that_race_are_seen",
    "copies to the host that nobody waits for": "tests/distributed/test_bus.py::test_planted_races_are_seen",
    "a step that waits for the device": "tests/distributed/test_no_waiting.py::test_a_question_is_seen",
    "activations that are fetched or freed too early": ("tests/unit/test_residual.py::test_planted_mistakes_are_races"),
    "imports upwards and in a circle": "tests/test_layers.py::test_a_planted_import_is_seen",
    "a leak, in a budget": (
        "tests/end_to_end/test_budget.py::test_a_leak_and_a_double_gather_are_caught_and_named_apart"
    ),
    "a second gather, in a budget": (
        "tests/end_to_end/test_budget.py::test_a_leak_and_a_double_gather_are_caught_and_named_apart"
    ),
}


def planted_by_tests() -> list[PlantedByTest]:
    """Faults that a test plants in a running rank, where its own instruments must see them."""
    from tests.faults.planted import FAULTS  # with torch and the engine: only where it is wanted

    named = [PlantedByTest(name, test) for name, test in PLANTED_BY_TESTS.items()]
    seen = "tests/faults/test_planted.py::test_a_planted_mistake_is_seen_and_named"
    return named + [PlantedByTest(fault.name, f"{seen}[{fault.name}]") for fault in FAULTS]
