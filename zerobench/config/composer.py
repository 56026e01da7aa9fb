"""Composes configs of overrides through Hydra, and asks them which keys they have and which values fit there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from . import size_limits
from .byte_sizes import SUFFIX
from .hydra_keys import quoted
from .schema import SCHEMAS
from .unknown_keys import meant, nearest, type_name

GROUPS = (*SCHEMAS, "experiment")


class Composer:
    """Knows every choice, those of `users` and of `extra_dirs` included. `loader`: Hydra's, of the last config that was
    composed.
    """

    def __init__(self, config_dir: Path, users: dict[str, list[str]], extra_dirs: list[Path]) -> None:
        self._config_dir = config_dir
        self._extra_dirs = extra_dirs
        self.folders = (*extra_dirs, config_dir)
        self.choices = {group: self._found_choices(group) for group in GROUPS}
        for group, names in users.items():
            self.choices[group] += names
        self._composed: dict[tuple[str, ...], tuple[DictConfig, DictConfig]] = {}
        self.loader: Any = None

    def config_of(self, overrides: list[str]) -> DictConfig:
        """Composes the config of a command line of these overrides."""
        return self._compose(overrides)

    def hydra_of(self, overrides: list[str]) -> DictConfig:
        """Composes Hydra's own part of it."""
        hydra: DictConfig = self._compose(overrides, with_hydra=True).hydra
        return hydra

    def compose_whole(self, overrides: list[str]) -> DictConfig:
        """The config of `overrides` with Hydra's own part. Hydra's exceptions come through."""
        GlobalHydra.instance().clear()
        search = [f"hydra.searchpath=[{','.join(quoted(f'file://{d.resolve()}') for d in self._extra_dirs)}]"]
        with initialize_config_dir(str(self._config_dir.resolve()), version_base="1.3"):
            self.loader = GlobalHydra.instance().config_loader()
            return compose(
                "config", overrides=[*overrides, *(search if self._extra_dirs else [])], return_hydra_config=True
            )

    def _compose(self, overrides: list[str], with_hydra: bool = False) -> DictConfig:
        """The config of `overrides`. Both forms are composed at once: Hydra takes a quarter of a second each time."""
        where = tuple(overrides)
        if where not in self._composed:
            whole = self.compose_whole(overrides)
            plain = whole.copy()
            with open_dict(plain):
                del plain["hydra"]
            self._composed[where] = (plain, whole)
        return self._composed[where][with_hydra]

    def _found_choices(self, group: str) -> list[str]:
        found = {
            path.stem for where in (self._config_dir, *self._extra_dirs) for path in (where / group).glob("*.yaml")
        }
        return sorted(found)

    def _lacks(self, key: str, overrides: list[str]) -> str:
        """Returns a sentence where the composed config has no such key, or ""."""
        node: Any = self._compose(overrides)
        path: list[str] = []
        for part in key.split("."):
            if path == ["huggingface", "options"]:
                return ""
            known = list(node) if isinstance(node, DictConfig) else []
            if part not in known:
                under = f" under {overrides[0]}" if overrides and path else ""
                had = self._had_by(key)
                return f"{key}: no such key{under}{had or meant(key, known, '.'.join(path))}"
            path.append(part)
            node = node._get_node(part)
        return ""

    def _had_by(self, key: str) -> str:
        """Names the choices of the key's group that have it, to follow a sentence."""
        group, _, rest = key.partition(".")
        having = [name for name, kind in SCHEMAS.get(group, {}).items() if rest in (one.name for one in fields(kind))]
        words = "|".join(name for name in self.choices.get(group, []) if name in having)
        return f"; choose {group}={words} for it" if words else ""

    def _problems_of_values(self, key: str, values: list[Any], overrides: list[str]) -> list[str]:
        """Returns a sentence for each of the values that does not fit in the key's place, the extremes of many."""
        config = self._compose(overrides)
        *path, last = key.split(".")
        parent = OmegaConf.select(config, ".".join(path)) if path else config
        if path[:2] == ["huggingface", "options"]:
            return []
        node = parent._get_node(last)
        if isinstance(node, DictConfig):
            return [f"{key}: it has parts; set one of them{nearest('', [f'{key}.{k!s}' for k in node])}"]
        problems = []
        for value in size_limits.extremes(values):
            if isinstance(value, str) and "${" in value:
                continue  # an interpolation has its value when the cell is composed
            try:
                OmegaConf.update(config.copy(), key, value)
            except OmegaConfBaseException:
                size = ", as 1048576 or 1MiB" * key.endswith(SUFFIX)
                problems.append(f"{key}={value}: wants {type_name(node)}{size}, and {value!r} is none")
        return problems
