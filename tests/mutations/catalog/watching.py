"""Faults of the watch over a loop of the user's."""

from __future__ import annotations

from ..mutant import Mutant

WATCH = "tests/unit/test_watch.py"
RANKS = "tests/distributed/test_watch_ranks.py"
BY_HAND = f"{RANKS}::test_a_loop_written_by_hand_costs_what_the_harness_says"
LEFT = f"{WATCH}::test_nothing_is_left_where_a_watch_has_been"
LATE = f"{WATCH}::test_a_late_watch_sees_what_an_instrument_sees_that_was_there_from_the_start"

MUTANTS = (
    Mutant(
        "watch-engine-does-not-label",
        "What an engine holds is labeled as if it were a plain model's.",
        "zerobench/watching",
        "        for engine in self._engines:\n            engine.label_held()\n",
        "",
        (f"{BY_HAND}[zero1]", f"{BY_HAND}[zero3]"),
    ),
    Mutant(
        "watch-parameters-by-their-outer-tensor",
        "A DTensor is labeled in place of what it contains.",
        "zerobench/watching",
        "                label_parts(parameter, labels.PARAMETERS, name)\n",
        "                labels.label(parameter, labels.PARAMETERS, name)\n",
        (f"{BY_HAND}[fsdp2]",),
    ),
    Mutant(
        "watch-engines-step-ends-with-the-optimizers",
        "What an engine does after its optimizer's step is no part of the update.",
        "zerobench/watching",
        '            for method, phase in (("backward", "backward"), ("step", "update")):\n',
        '            for method, phase in (("backward", "backward"),):\n',
        (f"{BY_HAND}[zero1]",),
    ),
    Mutant(
        "watch-broadcast-of-buffers-in-the-volume",
        "DDP's broadcast of buffers counts as traffic of the training.",
        "zerobench/watching",
        '        if callable(getattr(self._model, "_sync_buffers", None)):',
        '        if callable(getattr(self._model, "_sync_no_buffers", None)):',
        (f"{RANKS}::test_a_model_is_known_to_be_in_ddp_whose_buffers_are_control_traffic",),
    ),
    Mutant(
        "watch-waits-for-a-rank-without-a-sentence",
        "The timeout of a store in a file is not known as one.",
        "zerobench/watching",
        "        except RuntimeError:  # a file store raises no DistError\n            missing.append(other)\n",
        "        except dist.DistError:\n            missing.append(other)\n",
        (f"{RANKS}::test_a_rank_that_leaves_early_is_named",),
    ),
    Mutant(
        "watch-rank-keeps-its-problem",
        "A rank whose loop cannot be accounted does not say so to rank 0, which waits.",
        "zerobench/watching",
        "        if PROBLEM in record:",
        '        if "trouble" in record:',
        (f"{RANKS}::test_a_rank_that_leaves_early_is_named",),
    ),
    Mutant(
        "watch-leaves-hooks-on-parameters",
        "The hooks that hear of gradients stay on the parameters.",
        "zerobench/probes",
        "self._stack.callback(parameter.register_hook(partial(self._gradient_arrived, number, name)).remove)",
        "parameter.register_hook(partial(self._gradient_arrived, number, name))",
        (f"{LEFT}[over]", f"{LEFT}[error]"),
    ),
    Mutant(
        "watch-hears-threads-after-its-end",
        "A thread that outlives the watch goes on filling its ledger.",
        "zerobench/probes",
        "        listening.clear()\n",
        "",
        (f"{WATCH}::test_a_thread_that_outlives_the_watch_is_heard_no_more",),
    ),
    Mutant(
        "watch-keeps-the-model",
        "A watch that has stopped keeps its model alive.",
        "zerobench/watching",
        "                vars(self).pop(name, None)\n",
        "                vars(self).get(name, None)\n",
        (f"{LEFT}[over]",),
    ),
    Mutant(
        "watch-takes-an-engines-own-step",
        "An attribute that a watch has replaced is deleted, although the object had its own.",
        "zerobench/watching",
        "            setattr(owner, name, own)\n",
        "            delattr(owner, name)\n",
        (f"{WATCH}::test_an_engine_in_an_optimizers_place_gets_its_own_step_back",),
    ),
    Mutant(
        "watch-misses-a-skipped-update",
        "An update that a scaler skips makes two steps one.",
        "zerobench/watching",
        "            if given in (optimizer, inner) and seen[0] == before:\n",
        "            if given in () and seen[0] == before:\n",
        (f"{WATCH}::test_an_update_that_a_scaler_skips_ends_a_step",),
    ),
    Mutant(
        "watch-misses-states-of-late-optimizers",
        "Optimizer states that come to be while it watches are temporary.",
        "zerobench/watching",
        "        self._holdings.label_updated()\n",
        "",
        (f"{LATE}[plain]",),
    ),
)
