"""A file of published runs, compared: plans, executions of those that are not known yet, causes of what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ....config.cell import CellConfig
from ....fake_execution import Execution, Limits, Target, execute_all
from .causes import Trial, explained, is_part, trials_of
from .judge import Judged, Sizes, error_of, range_of
from .plan import Plan, plan_of
from .rows import Run
from .said import NotGivenError
from .store import Store

Tell = Callable[[str, int, int], None]
"""Takes what is done, the count of cells that are done, and of all."""


def compare(runs: Sequence[Run], store: Store, tell: Tell, jobs: int | None, limits: Limits) -> list[Judged]:
    """Returns a row for each run, in their order. What was executed goes to `store` as it is found."""
    how, first = (jobs, limits), [_planned(run) for run in runs]
    plans = [plan for _, plan in first if plan is not None]
    _execute("published runs", plans, store, tell, *how)
    judged = [(one if plan is None else _judge(one, plan, store), plan) for one, plan in first]
    far = {one.run.id: (one, plan) for one, plan in judged if plan and one.error is not None and not one.close}
    tried: dict[str, list[Trial]] = {name: [] for name in far}
    for at_once in (1, 2):
        more = {name: list(trials_of(one.run, plan, at_once)) for name, (one, plan) in far.items()}
        _execute(f"causes, {at_once} at once", [one.plan for mine in more.values() for one in mine], store, tell, *how)
        for name, mine in more.items():
            tried[name] += mine
        far = {name: pair for name, pair in far.items() if is_part(_explain(*pair, tried[name], store).explanation)}
    return [
        _explain(one, plan, tried[one.run.id], store) if plan and one.run.id in tried else one for one, plan in judged
    ]


def _planned(run: Run) -> tuple[Judged, Plan | None]:
    if run.peak_mem_gib is None:
        return Judged(run, "no peak", "the source prints none"), None
    try:
        plan = plan_of(run)
    except NotGivenError as error:
        return Judged(run, "no estimate", str(error)), None
    return Judged(run, "planned", assumed="; ".join(plan.assumed)), plan


def _execute(
    what: str, plans: Sequence[Plan], store: Store, tell: Tell, jobs: int | None, limits: Limits
) -> None:  # fmt: skip
    by_cell = {(plan.config.cell_id, plan.target): plan for plan in plans}
    waiting = [plan for plan in by_cell.values() if store.find(plan.config, plan.target) is None]
    done = len(by_cell) - len(waiting)
    tell(what, done, len(by_cell))
    for target in dict.fromkeys(plan.target for plan in waiting):
        mine = [plan.config for plan in waiting if plan.target == target]

        def heard(number: int, news: object, mine: Sequence[CellConfig] = mine, target: Target = target) -> None:
            nonlocal done
            if isinstance(news, Execution):
                store.add(mine[number], target, news)
                done += 1
                tell(what, done, len(by_cell))

        execute_all(mine, target, jobs, heard, limits)


def _found(plan: Plan, store: Store) -> Sizes:
    found = store.find(plan.config, plan.target)
    assert found is not None
    return found


def _judge(one: Judged, plan: Plan, store: Store) -> Judged:
    run, sizes = one.run, _found(plan, store)
    if sizes.problem:
        return replace(one, status="failed", reason=sizes.problem)
    assert run.peak_mem_gib is not None
    low, high = range_of(sizes, run.peak_kind)
    error = error_of(sizes, run.peak_kind, run.peak_mem_gib)
    return replace(one, status="compared", low_bytes=low, high_bytes=high, error=error)


def _explain(one: Judged, plan: Plan, trials: Sequence[Trial], store: Store) -> Judged:
    assert one.error is not None
    found = [(trial, _found(trial.plan, store)) for trial in trials]
    return replace(one, explanation=explained(one.run, one.error, found, _found(plan, store)))
