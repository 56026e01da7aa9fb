"""--help: complete, of groups, choices and keys."""

from dataclasses import MISSING, fields

import pytest

from zerobench import cli
from zerobench.config.keys import GROUPS, IDENTITY, KEYS
from zerobench.config.schema import SCHEMAS, SECTIONS, Config
from zerobench.ranks import fork_server

TOP = [one.name for one in fields(Config) if one.default is not MISSING and one.name not in SCHEMAS]


def test_every_key_has_a_line_and_every_line_a_key() -> None:
    schemas = [(group, schema) for group, choices in SCHEMAS.items() for schema in choices.values()]
    below = {f"{name}.{one.name}" for name, schema in [*schemas, *SECTIONS.items()] for one in fields(schema)}
    assert set(KEYS) == {*TOP, *(key for key in below if key.split(".")[-1] not in IDENTITY)}
    assert all(meaning and meaning[-1] != "." for meaning in (key.meaning for key in KEYS.values()))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(list(arguments)) == 0
    return capsys.readouterr().out


def test_no_arguments_print_the_help_and_start_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setattr(fork_server, "start", lambda: pytest.fail("a run would be started"))
    assert shown(capsys) == shown(capsys, "--help") == shown(capsys, "--quiet")


def test_top_level_help_has_each_group_and_key_with_its_default(capsys) -> None:
    text = shown(capsys, "--help")
    for group in (*SCHEMAS, "experiment"):
        assert f"  {group:<11}{GROUPS[group].meaning}" in text
    for key in (*TOP, "optimizer.lr=0.0003", "measure.steps=10", "strategy.bucket_bytes=", "data.path=null"):
        assert f"\n  {key}" in text
    assert "hydra/launcher" not in text
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("strategy=zero3", ["strategy=zero3\n  Our ZeRO-3", "strategy.prefetch=1", "[units]", "gathered ahead"]),
        ("strategy", ["strategy=zero3", "strategy=ddp", "torch DistributedDataParallel"]),
        ("experiment=stages", ["The main job"]),
        ("optimizer.lr", ["optimizer.lr=0.0003", "learning rate"]),
        ("launch", ["launch.timeout_s=1800", "[seconds]"]),
    ],
)
def test_a_word_behind_help_is_explained(word: str, wanted: list[str], capsys) -> None:
    text = shown(capsys, "--help", word)
    assert "schema" not in text
    for words in wanted:
        assert words in text
