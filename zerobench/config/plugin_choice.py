"""Chooses and checks the Hydra plugins that a command line or its experiment names: a launcher and a sweeper.

compose     composes Hydra's part of the config of some overrides
problems    error messages; if there are any, nothing is chosen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from . import launcher, sweeper
from .hydra_keys import launching, problem_of, problem_of_code
from .launcher import LauncherChoice, chosen_launcher
from .sweeper import KEY, Proposed, objectives_of

Compose = Callable[[list[str]], DictConfig]


def choose_launcher(
    compose: Compose, parsed: Sequence[Override], study: list[str], problems: list[str]
) -> LauncherChoice | None:
    """Returns the launcher that the command line or the experiment names, with its settings; None for our own."""
    chosen = [one for one in parsed if launching([one.input_line or ""])]
    problems += [problem for one in chosen if (problem := problem_of(one))]
    if not problems and not study and chosen and not any(one.key_or_group == launcher.GROUP for one in chosen):
        problems.append(f"{chosen[0].input_line}: no Hydra launcher is chosen; add {launcher.GROUP}=")
    words = [*study, *(one.input_line or "" for one in chosen)]
    settings = [word for word in words if word.lstrip("+").startswith(f"{launcher.SETTINGS}.")]
    if settings and not problems:
        usual = compose([word for word in words if word not in settings]).launcher
        problems += [problem for word in settings if (problem := launcher.problem_of_setting(word, usual))]
    return None if problems else chosen_launcher(_checked(compose, words, problems), tuple(words))


def choose_sweeper(
    compose: Compose, parsed: Sequence[Override], study: list[str], objective: str | None, problems: list[str]
) -> Proposed | None:
    """Returns the sweeper that the command line or the experiment names, with its objectives; None for Hydra's own."""
    own = [one for one in parsed if sweeper.sweeping([one.input_line or ""])]
    problems += [problem for one in own if (problem := sweeper.problem_of_override(one))]
    if problems:
        return None
    words = [one.input_line or "" for one in own]
    groups = [word for word in words if word.lstrip("+").startswith(sweeper.GROUP)]
    try:
        found = sweeper.chosen(_checked(compose, [*study, *groups], problems), groups)
        if found is None:
            problems += _without_sweeper(words, objective)
            return None
        problems += [problem] if (problem := sweeper.problem_of_settings(found, words)) else []
        if objective is None:
            problems.append(f"{found.chosen}: it needs an objective; add {KEY}=COLUMN, as {KEY}=tokens_per_s")
        return None if problems or objective is None else _set(compose, [*study, *words], objective, problems)
    except ValueError as error:
        problems.append(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        problems.append(f"{' '.join(words)}: {str(error.__cause__ or error).splitlines()[0]}")
    return None


def _without_sweeper(words: list[str], objective: str | None) -> list[str]:
    settings = [word for word in words if word.lstrip("+").startswith(f"{sweeper.SETTINGS}.")]
    if settings:
        return [f"{settings[0]}: no Hydra sweeper is chosen; add {sweeper.GROUP}="]
    why = f"no sweeper asks for it; add {sweeper.GROUP}=optuna, or leave it out"
    return [f"{KEY}={objective}: {why}"] if objective is not None else []


def _set(compose: Compose, words: list[str], objective: str, problems: list[str]) -> Proposed | None:
    found = sweeper.chosen(_checked(compose, words, problems), words)
    problems += [problem] if found and (problem := sweeper.problem_of_settings(found, [])) else []
    return None if found is None or problems else sweeper.with_objectives(found, objectives_of(objective))


def _checked(compose: Compose, words: list[str], problems: list[str]) -> DictConfig:
    """Composes Hydra's part of the config, allowing only code of installed plugins."""
    hydra = compose(words)
    problems += [problem] if (problem := problem_of_code(hydra)) else []
    return hydra


def with_axes(
    proposed: Proposed, overrides: Sequence[tuple[Override, str, Sequence[Any]]], problems: list[str]
) -> Proposed:
    """Returns `proposed` with its axes and fixed overrides. `overrides`: each with its checked line and its values."""
    axes, fixed = list[str](), list[str]()
    for override, line, values in overrides:
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra" or key == KEY:
            continue
        if override.is_sweep_override():
            axes.append(sweeper.axis(key, override, values, proposed.is_grid()))
        else:
            fixed.append(line)
    if not axes:
        words = "nothing to choose from; give keys several values, as strategy=ddp,zero2 or micro_batch=range(1,9)"
        problems.append(f"{proposed.chosen}: {words}")
    return replace(proposed, axes=tuple(axes), fixed=tuple(fixed))
