"""Command lines, valid and damaged, and what must be true of each.

It makes cells, or is refused with messages that name a word of it; nothing else is touched (watch.py). Each cell
survives being written and read, is made again by the same words, and where it has no problem one of its ranks can be
executed. The config folder of a case lies in FOLDER, a word that is replaced by a path.
"""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import types
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given, note, settings
from hypothesis import strategies as st

from zerobench.config.cell import Cell, CellConfig
from zerobench.config.compose import RefusedError, compose_cells
from zerobench.config.flat import name_cells
from zerobench.config.keys import KEYS
from zerobench.config.schema import SCHEMAS, Config, config_dir, strategy_choices
from zerobench.fake_execution import execute
from zerobench.sizes import LONGEST, printable

from .conftest import examples
from .watch import watched
from .words import FLAGS, HOSTILE, HYDRAS, WORDS, YAMLS

PYTHONS = re.compile(
    r"\b((Attribute|Type|Key|Index|Assertion|Recursion|UnboundLocal|Name|Runtime|Overflow|UnicodeEncode|UnicodeDecode"
    r"|ZeroDivision|NotImplemented|Memory|Value)Error|StopIteration|Traceback|object at 0x)\b"
)
"""Words that a person should not be given for a reason."""

FOLDER = "@FOLDER@"
EXPERIMENTS = tuple(sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml")))
CHOICES = {group: tuple(sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))) for group in SCHEMAS}
CHOICES |= {"strategy": tuple(strategy_choices()), "measure": ("default", "quick", "long")}
OURS = ("ddp", "zero1", "zero2", "zero3", "megatron")
SMALL = ("gpt_tiny", "mlp", "gpt", "gpt_small")
SECTIONS = ("measure", "launch", "search", "huggingface")
WORLD = ("world_size", "rank", "device", "backend", "tensors", "node_size", "shard_group")
MARKS = ("+", "++", "~", "~~", "+~", "@", "-", "--", " ", "'", "=", ".", "hydra.", "config.", "??")

Words = list[str]


def keys_of(section: str, schema: Any) -> dict[str, Any]:
    """Key -> type of a dataclass of the config's."""
    hints, prefix = get_type_hints(schema), f"{section}." if section else ""
    return {f"{prefix}{one.name}": hints[one.name] for one in fields(schema) if one.name not in ("name", "kind")}


TOP = {key: kind for key, kind in keys_of("", Config).items() if not (isinstance(kind, type) and is_dataclass(kind))}
OF_SECTIONS = {name: keys_of(name, get_type_hints(Config)[name]) for name in SECTIONS}
OF_CHOICES = {
    group: {name: keys_of(group, schema) for name, schema in schemas.items()} for group, schemas in SCHEMAS.items()
}
EVERY_KEY = sorted(
    {*TOP, *(key for keys in OF_SECTIONS.values() for key in keys)}
    | {key for choices in OF_CHOICES.values() for keys in choices.values() for key in keys}
)


def value(key: str, kind: Any) -> st.SearchStrategy[str]:
    """Values of a key's type, most often within its bounds."""
    if key in WORDS:
        return st.sampled_from(WORDS[key])
    kinds = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)
    base = next((one for one in (bool, int, float, str) if one in kinds), kinds[0])
    none = [st.just("null")] * (type(None) in kinds)
    if base is bool:
        return st.one_of(st.sampled_from(("true", "false")), *none)
    if base not in (int, float):
        return st.sampled_from(("a", "'b c'", "null", "auto"))
    least, most = (key in KEYS and KEYS[key].limits) or (0, 64)
    beyond = st.sampled_from((least, most, least - 1, most + 1, 0, -1))
    if base is int:
        within = st.integers(int(least), int(min(most, 65536)))
        return st.one_of(within, within.map(lambda n: n % 17 + int(least)), beyond.map(int), *none).map(str)
    return st.one_of(st.floats(least, min(most, 1.0)) if least < 1 else beyond, beyond, *none).map(
        lambda x: x if isinstance(x, str) else f"{x:g}"
    )


@st.composite
def valid(draw: st.DrawFn) -> Words:
    """Choices of groups, keys of theirs, and a world, most of which go together."""
    chosen = {"strategy": draw(st.sampled_from((*OURS, *CHOICES["strategy"])))}
    chosen["model"] = draw(st.sampled_from((*SMALL * 4, *CHOICES["model"])))
    others = sorted(set(CHOICES) - {"strategy", "model"})
    for group in draw(st.lists(st.sampled_from(others), max_size=4, unique=True)):
        chosen[group] = draw(st.sampled_from(CHOICES[group]))
    keys = {key: kind for key, kind in TOP.items() if key not in WORLD}
    for group, choice in chosen.items():
        keys |= OF_CHOICES[group].get(choice, OF_CHOICES[group].get(choice.partition("_")[0], {}))
    for section in draw(st.lists(st.sampled_from(SECTIONS), max_size=2, unique=True)):
        keys |= OF_SECTIONS[section] if section != "huggingface" or chosen["model"] == "huggingface" else {}
    words = [f"{group}={choice}" for group, choice in chosen.items()]
    for key in draw(st.lists(st.sampled_from(sorted(keys)), max_size=4, unique=True)):
        words.append(f"{key}={draw(value(key, keys[key]))}")
    return draw(st.permutations(words + draw(world())))


@st.composite
def world(draw: st.DrawFn) -> Words:
    """Words of a world, simulated in two of three cases."""
    if draw(st.integers(0, 2)):
        n = draw(st.sampled_from((1, 2, 3, 4, 8, 16, 30, 64, 128, 1000, 1024)))
        words = ["backend=simulated", "tensors=fake"][: draw(st.sampled_from((2, 1)))]
        words += draw(st.sampled_from(([], [], [f"rank={n - 1}"])))
    else:
        n = draw(st.sampled_from((1, 2, 3, 4, 8)))
        words = [draw(st.sampled_from(("device=cpu", "backend=gloo")))]
    for key in draw(st.lists(st.sampled_from(("node_size", "shard_group")), max_size=2, unique=True)):
        words.append(f"{key}={draw(st.integers(0, 2 * n))}")
    return [*words, f"world_size={n}"]


@st.composite
def sweep(draw: st.DrawFn) -> Words:
    """One or two axes over the same."""
    axes = {
        "seed": ("1,2", "range(0,3)", "choice(4,5)", "shuffle(1,2)", "sort(2,1)", "tag(x,1,2)"),
        "world_size": ("2,4",), "sequence": ("16,32",), "accumulation": ("1,2",), "precision": ("fp32,bf16",),
        "strategy": ("ddp,zero1", "zero2,zero3", "fsdp2,megatron"), "offload": ("none,cpu",),
    }  # fmt: skip
    words = draw(valid())
    for key in draw(st.lists(st.sampled_from(sorted(axes)), min_size=1, max_size=2, unique=True)):
        form = draw(st.sampled_from(("{0}={1}", "{0}={1}", "+{0}={1}")))
        kept = [word for word in words if not word.startswith(f"{key}=")]
        words = [*kept, form.format(key, draw(st.sampled_from(axes[key])))]
    return draw(st.sampled_from((["-m", *words], ["--multirun", *words], [*words, "hydra.mode=MULTIRUN"])))


HOSTILE_VALUES = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))
LETTERS = st.sampled_from(("", "x", "=", ".", "/", "@", " ", "-", "é", "\x00", "$", "~"))
GROUP = st.sampled_from((*CHOICES, *SECTIONS, "nothing"))
ADDED: st.SearchStrategy[str] = st.one_of(
    st.sampled_from(EVERY_KEY).flatmap(
        lambda key: st.one_of(st.sampled_from(WORDS.get(key, ("1",))), HOSTILE_VALUES).map(lambda one: f"{key}={one}")
    ),
    st.sampled_from((*EVERY_KEY, *CHOICES, "hydra", "hydra.sweeper")).map("~{}".format),
    st.sampled_from(HYDRAS),
    st.sampled_from(("-m", "--multirun", "--run", "-r")),
    st.sampled_from((*EXPERIMENTS, "nothing", "null", "../config", "stages,losses", "${seed}")).map(
        "experiment={}".format
    ),
    st.tuples(GROUP, HOSTILE_VALUES).map(lambda both: f"{both[0]}={{name:{both[1]}}}"),
    st.tuples(GROUP, st.sampled_from(("_global_", "x", "hydra", ""))).map(lambda both: f"{both[0]}@{both[1]}=none"),
    HOSTILE_VALUES,
)
"""Words that damage a line: keys of any choice, deletions, Hydra's keys, and what is no key at all."""


@st.composite
def damaged(draw: st.DrawFn) -> Words:
    """A valid line with one to three damages: to a value, a letter, a word's beginning, or by a word more."""
    words = draw(valid())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(words) - 1))
        word, at = words[place], draw(st.integers(0, len(words[place])))
        way = draw(st.sampled_from(("value", "value", "letter", "mark", "repeated", "added", "added")))
        if way == "value":
            words[place] = f"{word.partition('=')[0]}={draw(HOSTILE_VALUES)}"
        elif way == "letter":
            words[place] = word[:at] + draw(LETTERS) + word[at + draw(st.integers(0, 1)) :]
        elif way == "mark":
            words[place] = draw(st.sampled_from(MARKS)) + word
        else:
            words.append(word if way == "repeated" else draw(ADDED))
    return words


def flags() -> st.SearchStrategy[Words]:
    """A valid or damaged line and a flag of Hydra's or of nobody's."""
    return st.tuples(st.one_of(valid(), damaged()), st.sampled_from(FLAGS)).map(lambda both: [*both[0], both[1]])


@st.composite
def folder(draw: st.DrawFn) -> tuple[Words, dict[str, str]]:
    """A config folder with a file of a group or an experiment, most often of what nobody should write."""
    group = draw(st.sampled_from(("experiment", *CHOICES)))
    others = (
        "config.yaml", "hydra/launcher/basic.yaml", "hydra/job_logging/default.yaml", "experiment/stages.yaml",
        "schema/model/gpt.yaml", "experiment/deep/er.yaml", "model/gpt_tiny.yaml", "experiment/x.yml",
    )  # fmt: skip
    names = [f"{group}/mine.yaml", *draw(st.lists(st.sampled_from(others), max_size=1))]
    files = {name: draw(st.sampled_from(YAMLS)) for name in names}
    kept = [word for word in draw(valid()) if not word.startswith(f"{group}=")]
    flag = draw(st.sampled_from(([f"--config-dir={FOLDER}"], ["--config-dir", FOLDER], ["-m", "-cd", FOLDER])))
    return [*flag, f"{draw(st.sampled_from(('', '+')))}{group}=mine", *kept], files


NO_FILES: dict[str, str] = {}
KINDS: dict[str, st.SearchStrategy[tuple[Words, dict[str, str]]]] = {
    **{kind: lines.map(lambda words: (words, NO_FILES)) for kind, lines in (
        ("valid", valid()), ("sweep", sweep()), ("damaged", damaged()), ("flags", flags()),
    )},
    "folder": folder(),
}  # fmt: skip


@pytest.mark.shown(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_line_makes_cells_or_is_refused(kind: str, tmp_path: Path) -> None:
    @settings(max_examples=examples())
    @given(KINDS[kind], st.integers(0, 9), st.integers(0, 3))
    def case(line: tuple[Words, dict[str, str]], twice: int, executed: int) -> None:
        judge(*line, tmp_path, twice == 0, executed == 0)

    case()


def judge(words: Words, files: dict[str, str], room: Path, twice: bool, executed: bool) -> None:
    """Composes a command line in a room of its own, and checks all that it made."""
    place = room / "folder"
    shutil.rmtree(place, ignore_errors=True)
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    words = [word.replace(FOLDER, str(place)) for word in words]
    note(f"zerobench {' '.join(map(repr, words))}")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), watched(room, place):
        try:
            cells = compose_cells(words)
        except RefusedError as error:
            cells, problems = [], error.problems
            assert problems, "refused without a message"
            _check_messages(problems, words)
    written = [key for content in files.values() for key in re.findall(r"[\w./]+(?=:)", content)]
    for cell in cells:
        _check_cell(cell, [*words, *written])
    if twice and cells:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            again = compose_cells(words)
        assert {cell.cell_id for cell in again} == {cell.cell_id for cell in cells}  # a sweep may be shuffled
    sound = [cell.config for cell in cells if not cell.problems and _is_small(cell.config)]
    if executed and sound:
        assert execute(sound[0]).problem == ""


def _check_messages(messages: Sequence[str], words: Words) -> None:
    named = {part for word in words for part in (word, *word.replace("=", ".").replace("/", ".").split(".")) if part}
    named |= {part for word in words for part in (*word.split("="), *re.split(r"[^\w-]+", word))} - {""}
    named |= {"''" for word in words if not word}
    named = {printable(name)[:60] for name in named} | {*CHOICES, *SECTIONS, "world_size", "batch", "hydra"}
    named |= {"experiment", "arena", "sequence", "rank"}  # words of ours, of which one about a default may name one
    for one in messages:
        assert not PYTHONS.search(one)
        assert any(name in one for name in named), one
        assert len(one) <= LONGEST
        assert one == printable(one)


def _check_cell(cell: Cell, words: Words) -> None:
    """Checks a cell that was made: its messages, and its way to a file and back."""
    _check_messages(cell.problems, words)
    written, config = cell.config.as_dict(), cell.config
    name_cells([config])
    if cell.problems and not _is_finite(written):  # its row has null there
        return
    text = json.dumps(written, allow_nan=False)
    in_yaml = yaml.safe_load(yaml.safe_dump(config.written(), sort_keys=False))
    for again in (CellConfig.from_dict(written), CellConfig.from_json(text), CellConfig.from_dict(in_yaml)):
        assert again == config
        assert again.cell_id == config.cell_id


def _is_finite(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, parts)) and not (isinstance(value, float) and not math.isfinite(value))


def _is_small(config: CellConfig) -> bool:
    """True where an execution takes seconds: few units, micro-batches, tokens and, a rank, parameters."""
    layers, hidden = getattr(config.model, "layers", 4), getattr(config.model, "hidden", 64)
    work = layers * (1 + getattr(config.model, "tiles", 1) / 4) * config.accumulation * max(1, config.micro_batch / 64)
    if 12 * layers * hidden**2 / config.world_size > 10**10:
        return False
    return work < 200 and config.sequence <= 65536 and config.search.memory_limit is None
