"""Wrong command lines and damaged files: one error message each."""

import os
import random
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from zerobench.config.compose import RefusedError, compose_cells
from zerobench.host.files import read_text, read_yaml


def folder_with(where: Path, name: str, content: str) -> str:
    path = where / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{content}\n")
    return f"--config-dir={where}"


def test_configs_that_take_one_another_in_are_told_in_words(tmp_path: Path) -> None:
    flag = folder_with(tmp_path, "data/mine", "defaults: [mine]")
    with pytest.raises(RefusedError, match="take one another in") as refused:
        compose_cells([flag, "data=mine"])
    assert "data=mine" in str(refused.value)


def test_launcher_without_a_schema_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "hydra/launcher").mkdir(parents=True)
    (tmp_path / "hydra/launcher/mine.yaml").write_text("_target_: x")
    with pytest.raises(RefusedError, match=r"it cannot be composed: mine\.yaml has _target_=x, which is no"):
        compose_cells(["-m", f"--config-dir={tmp_path}", "hydra/launcher=mine", "strategy=ddp,zero1", "world_size=2"])


def test_the_last_of_two_overrides_counts_also_after_a_glob() -> None:
    cells = compose_cells(["-m", "strategy=glob(zero*)", "strategy=ddp,zero1", "world_size=2"])
    assert [cell.config.strategy.name for cell in cells] == ["ddp", "zero1"]


@pytest.mark.slow
def test_hydras_globals_and_random_numbers_are_left_as_they_were() -> None:
    before = GlobalHydra.instance().hydra, HydraConfig.instance().cfg, random.getstate()
    assert len(compose_cells(["-m", "seed=shuffle(1,2,3)", "world_size=2"])) == 3
    compose_cells(["seed=1", "world_size=2"])
    assert (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, random.getstate()) == before


BEGINNING = r"begin its yaml with 'defaults: \[/schema/optimizer/KIND@_here_\]'"


@pytest.mark.slow
@pytest.mark.parametrize(("group", "content", "words"), [
    ("model", "# @package _global_\nseed: 3", r"^model: it has no value; begin its yaml with .*/schema/model/"),
    ("model", "# @package _global_", r"^model: it has no value; begin"),
    ("model", "", r"^model\.\w+: it has no value"),
    ("model", "defaults: [/schema/model/gpt@_here_]\nkind: x", r"^model\.kind=x: the schema of its yaml has gpt; lea"),
    ("zeropp", "3", r"zeropp/mine\.yaml: it holds '3'; a choice of zeropp has KEY: VALUE"),
    ("optimizer", "name: x", rf"optimizer\.name=x: {BEGINNING}"),
    ("optimizer", "hydra: null", r"Key 'hydra' not in 'Optimizer'"),
])  # fmt: skip
def test_a_choice_without_its_schema_is_refused_by_its_file_or_key(
    group: str, content: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(content)
    with pytest.raises(RefusedError, match=words):
        compose_cells([f"--config-dir={tmp_path}", f"{'+' * (group == 'optimizer')}{group}=mine"])


@pytest.mark.parametrize(("arguments", "words"), [
    (["--config-dir", "no/such"], r"^--config-dir no/such: there is no such folder"),
    (["--shell-completion"], r"^--shell-completion: it cannot be composed: Expecting one subcommand"),
    ([""], r"^'': neither KEY=VALUE nor a verb"),
])  # fmt: skip
def test_words_that_no_person_types_are_answered_too(arguments: list[str], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        compose_cells(arguments)


def test_a_text_of_others_is_read_or_refused_by_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "text").write_text("ä", encoding="utf-8")
    assert read_text(tmp_path / "text") == "ä"
    with pytest.raises(ValueError, match=r"/pipe: it is no file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"/bytes: it is no text"):
        read_text(tmp_path / "bytes")
    with pytest.raises(FileNotFoundError, match="/none"):
        read_text(tmp_path / "none")
    (tmp_path / "pipe").rename(tmp_path / "x.yaml")
    with pytest.raises(ValueError, match="it is no file"):
        read_yaml(tmp_path / "x.yaml")
