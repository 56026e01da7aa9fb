"""Command lines by number: valid mixes of groups and keys, sweeps, config folders; and the same, damaged.

The config folder of a case lies in FOLDER, a word that the oracle replaces by the path of a folder of the case's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from zerobench.config.schema import config_dir, strategy_choices

from .values import GROUPS, HOSTILE, SECTIONS, TOP, WORDS, every_key, value

FOLDER = "@FOLDER@"
EXPERIMENTS = tuple(sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml")))
CHOICES = {group: tuple(sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))) for group in GROUPS}
CHOICES |= {"strategy": tuple(strategy_choices()), "measure": ("default", "quick", "long")}
OURS = ("ddp", "zero1", "zero2", "zero3", "megatron")
SMALL = ("gpt_tiny", "mlp", "gpt_tiny", "gpt_tiny", "gpt", "gpt_small")
LISTED = {"seed": "1,2", "world_size": "2,4", "sequence": "16,32", "accumulation": "1,2", "precision": "fp32,bf16"}


@dataclass(frozen=True)
class Command:
    """`words` of a command line, and the `files` of its config folder, path -> content. `kind`: how it was drawn."""

    kind: str
    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


def command(seed: int, number: int) -> Command:
    """The command line of a number, the same each time."""
    draw = random.Random(f"{seed} config {number}")
    kind = draw.choices(("valid", "sweep", "damaged", "folder", "flags"), (40, 10, 38, 9, 3))[0]
    words = _valid(draw)
    if kind == "sweep":
        return Command(kind, tuple(_swept(draw, words)))
    if kind == "folder":
        return _with_folder(draw, words)
    for _ in range(draw.choice((1, 1, 2, 3)) if kind == "damaged" else 0):
        words = draw.choice(DAMAGES)(draw, words)
    if kind == "flags":
        words.insert(draw.randrange(len(words) + 1), draw.choice(FLAGS))
        words = words if draw.random() < 0.7 else _damaged_value(draw, words)
    return Command(kind, tuple(words))


def _valid(draw: random.Random) -> list[str]:
    """Choices of groups, keys of theirs, and a world, most of which go together."""
    chosen = {"strategy": draw.choice((*OURS, *OURS, *CHOICES["strategy"])), "model": draw.choice(SMALL)}
    if draw.random() < 0.05:
        chosen["model"] = draw.choice(CHOICES["model"])
    for group in ("data", "optimizer", "precision", "measure", "offload", "activation", "buffers", "zeropp"):
        if draw.random() < 0.3:
            chosen[group] = draw.choice(CHOICES[group])
    words = [f"{group}={choice}" for group, choice in chosen.items()]
    keys = dict(TOP)
    for group, choice in chosen.items():
        by_choice = GROUPS.get(group, {})
        keys |= by_choice.get(choice.removesuffix("_tuned"), by_choice.get(choice.partition("_")[0], {}))
    for section, own in SECTIONS.items():
        if draw.random() < 0.3 and (section != "huggingface" or chosen["model"] == "huggingface"):
            keys |= own
    for name in ("world_size", "rank", "device", "backend", "tensors", "node_size", "shard_group"):
        keys.pop(name)
    for key in draw.sample(sorted(keys), min(len(keys), draw.choice((0, 1, 1, 2, 3, 4)))):
        words.append(f"{key}={value(draw, key, keys[key])}")
    words += _world(draw)
    draw.shuffle(words)
    return words


def _world(draw: random.Random) -> list[str]:
    n = draw.choice((1, 2, 2, 3, 4, 4, 8))
    if draw.random() < 0.7:
        n = draw.choice((1, 2, 3, 4, 8, 16, 30, 64, 128, 1000, 1024))
        words = ["backend=simulated", "tensors=fake"][: draw.choice((1, 2, 2, 2))]
        words += [f"rank={draw.randrange(n)}"] if draw.random() < 0.2 else []
    else:
        words = ["device=cpu"] if draw.random() < 0.7 else ["backend=gloo"]
    divisors = [one for one in range(1, n + 1) if n % one == 0]
    for key in ("node_size", "shard_group"):
        if draw.random() < 0.15:
            words.append(f"{key}={draw.choice(divisors) if draw.random() < 0.9 else draw.randrange(2 * n)}")
    return [*words, f"world_size={n}"]


def _swept(draw: random.Random, words: list[str]) -> list[str]:
    """One or two axes over the same."""
    axes = {**LISTED, "strategy": ",".join(draw.sample(CHOICES["strategy"], 2)), "offload": "none,cpu"}
    axes |= {"seed": draw.choice(("1,2", "range(0,3)", "choice(4,5)", "shuffle(1,2)", "sort(2,1)", "tag(x,1,2)"))}
    for key in draw.sample(sorted(axes), draw.choice((1, 1, 2))):
        form = draw.choices(("{0}={1}", "+{0}={1}", "hydra.sweeper.params.{0}='{1}'"), (8, 1, 1))[0]
        words = [word for word in words if not word.startswith(f"{key}=")] + [form.format(key, axes[key])]
    draw.shuffle(words)
    return [draw.choice(("-m", "--multirun")), *words] if draw.random() < 0.95 else [*words, "hydra.mode=MULTIRUN"]


# -- damages ------------------------------------------------------------------------------------------------


def _damaged_value(draw: random.Random, words: list[str]) -> list[str]:
    place = draw.randrange(len(words))
    key = words[place].partition("=")[0]
    return [*words[:place], f"{key}={draw.choice(HOSTILE)}", *words[place + 1 :]]


def _added(draw: random.Random, words: list[str]) -> list[str]:
    """A key of any choice, with a value of its own, of another key or of none."""
    key = draw.choice(every_key())
    text = draw.choice((draw.choice(HOSTILE), draw.choice(WORDS.get(key, ("1",))), str(draw.randrange(100))))
    return [*words, f"{key}={text}"]


def _misspelled(draw: random.Random, words: list[str]) -> list[str]:
    place = draw.randrange(len(words))
    letters = list(words[place])
    at = draw.randrange(len(letters))
    letters[at : at + draw.randrange(2)] = draw.choice(("", "x", "=", ".", "/", "@", " ", "-", "é", "\x00", "$", "~"))
    return [*words[:place], "".join(letters), *words[place + 1 :]]


def _prefixed(draw: random.Random, words: list[str]) -> list[str]:
    place = draw.randrange(len(words))
    mark = draw.choice(("+", "++", "~", "~~", "+~", "@", "-", "--", " ", "'", "=", ".", "hydra.", "config.", "??"))
    return [*words[:place], mark + words[place], *words[place + 1 :]]


def _deleted(draw: random.Random, words: list[str]) -> list[str]:
    return [*words, "~" + draw.choice((*every_key(), *CHOICES, "hydra", "hydra.sweeper"))]


def _hydras(draw: random.Random, words: list[str]) -> list[str]:
    return [*words, draw.choice(HYDRAS)]


def _repeated(draw: random.Random, words: list[str]) -> list[str]:
    return [*words, draw.choice(words)]


def _multirun(draw: random.Random, words: list[str]) -> list[str]:
    return [draw.choice(("-m", "--multirun", "--run", "-r")), *words]


def _experiment(draw: random.Random, words: list[str]) -> list[str]:
    names = (*EXPERIMENTS, "nothing", "null", "../config", "stages,losses", "${seed}", "[stages]")
    return [*words[: draw.randrange(3)], f"{draw.choice(('', '+'))}experiment={draw.choice(names)}"]


def _nested(draw: random.Random, words: list[str]) -> list[str]:
    group = draw.choice((*CHOICES, *SECTIONS, "nothing"))
    return [
        *words,
        f"{draw.choice(('', '+', '++'))}{group}={{{draw.choice(('name', 'steps', 'x'))}:{draw.choice(HOSTILE)}}}",
    ]


def _moved(draw: random.Random, words: list[str]) -> list[str]:
    return [
        *words,
        f"{draw.choice(tuple(CHOICES))}@{draw.choice(('_global_', 'x', 'hydra', ''))}={draw.choice(('none', 'x'))}",
    ]


def _garbage(draw: random.Random, words: list[str]) -> list[str]:
    made = "".join(
        chr(draw.choice((draw.randrange(128), draw.randrange(0x300), 0x202E))) for _ in range(draw.randrange(40))
    )
    return [*words, draw.choice((made, f"seed={made}", f"{made}=1", draw.choice(HOSTILE)))]


DAMAGES: tuple[Callable[[random.Random, list[str]], list[str]], ...] = (
    _damaged_value, _damaged_value, _damaged_value, _added, _added, _misspelled, _misspelled, _prefixed, _deleted,
    _hydras, _repeated, _multirun, _experiment, _nested, _moved, _garbage,
)  # fmt: skip

HYDRAS = (
    "hydra/launcher=joblib", "hydra/launcher=basic", "hydra/launcher=nothing", "hydra/launcher=submitit_slurm",
    "hydra/sweeper=optuna", "hydra/sweeper=basic", "hydra/sweeper=nothing", "hydra.launcher.n_jobs=2",
    "hydra.launcher._target_=tests.fuzz.canary.sing", "hydra.sweeper._target_=tests.fuzz.canary.sing",
    "+hydra.callbacks.x._target_=tests.fuzz.canary.sing", "hydra.run.dir=x", "hydra.sweep.subdir=/x",
    "hydra.job.chdir=true", "hydra.output_subdir=x", "hydra.searchpath=[pkg://tests.fuzz.canary]",
    "hydra.verbose=true",
    "hydra.verbose=[tests]", "hydra.mode=RUN", "hydra.mode=x", "hydra.mode=null", "hydra.sweeper.params=null",
    "hydra.sweeper.params={seed:'1,2'}", "hydra.sweeper.params.strategy='ddp,zero1'", "hydra.sweeper.params=[1]",
    "hydra.sweeper.params.x=[1,2]", "hydra.sweeper.max_batch_size=1", "hydra={}", "hydra=null", "+hydra.x=1",
    "hydra/job_logging=disabled", "hydra/help=x", "hydra.runtime.choices.model=x", "hydra.overrides.task=[x]",
    "launch.retry=[crash,timeout,oom]", "launch.retry=[x]", "launch.group_by=[model]", "launch.group_by=x",
    "objective=peak_bytes", "objective=x", "launch.timeout_s=0", "launch.threads=-1",
)  # fmt: skip

FLAGS = (
    "--cfg", "--cfg=job", "--cfg=hydra", "--cfg=x", "--info", "--info=all", "--info=defaults-tree", "--info=x",
    "--package=x", "--resolve", "--config-name=other", "--config-path=/tmp", "--config-dir=/no-such-folder",
    "--config-dir=/dev/null", "--config-dir", "--experimental-rerun=config.pickle", "-cn", "--x", "-", "--", "---",
    "-m=1",
    "--shell-completion", "--hydra-help", "--config-dir=\x00", "--config-dir=" + "a" * 300, "--config-dir=.",
)  # fmt: skip


# -- config folders -----------------------------------------------------------------------------------------


def _with_folder(draw: random.Random, words: list[str]) -> Command:
    """A config folder with a file of a group or an experiment, most often of what nobody should write."""
    group = draw.choice(("experiment", "experiment", "experiment", *CHOICES))
    files = {f"{group}/mine.yaml": draw.choice(YAMLS)}
    if draw.random() < 0.2:
        other = draw.choice(("config.yaml", "hydra/launcher/basic.yaml", "hydra/job_logging/default.yaml",
        "experiment/stages.yaml",
                             "schema/model/gpt.yaml", "experiment/deep/er.yaml", "model/gpt_tiny.yaml",
                             "experiment/x.yml"))  # fmt: skip
        files[other] = draw.choice(YAMLS)
    kept = [word for word in words if not word.startswith(f"{group}=")]
    flag = draw.choice(([f"--config-dir={FOLDER}"], ["--config-dir", FOLDER], ["-cd", FOLDER]))
    mode = draw.choice(([], [], ["-m"]))
    return Command("folder", (*mode, *flag, f"{draw.choice(('', '+'))}{group}=mine", *kept), files)


GLOBAL = "# @package _global_\n"
LAUGHS = "\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1]", *(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)
)])  # fmt: skip

YAMLS = (
    f"{GLOBAL}seed: 3\n", f"{GLOBAL}defaults: [{{override /strategy: zero1}}]\nsequence: 16\n", f"{GLOBAL}sead: 3\n",
    f"{GLOBAL}hydra: {{mode: MULTIRUN, sweeper: {{params: {{seed: '1,2'}}}}}}\n", f"{GLOBAL}hydra: 3\n",
    f"{GLOBAL}hydra: {{sweeper: {{params: 3}}}}\n", f"{GLOBAL}hydra: {{sweeper: {{params: {{seed: [1, 2]}}}}}}\n",
    f"{GLOBAL}hydra: {{sweeper: {{params: {{'a b': '1,2'}}}}}}\n", f"{GLOBAL}hydra: null\n",
    f"{GLOBAL}hydra: {{mode: x}}\n",
    f"{GLOBAL}hydra: {{callbacks: {{x: {{_target_: tests.fuzz.canary.sing}}}}}}\n",
    f"{GLOBAL}hydra: {{launcher: {{_target_: tests.fuzz.canary.sing}}}}\n",
    f"{GLOBAL}hydra: {{sweeper: {{_target_: tests.fuzz.canary.sing}}}}\n",
    f"{GLOBAL}hydra: {{job_logging: {{version: 1, handlers: {{x: {{(): tests.fuzz.canary.sing}}}}}}}}\n",
    f"{GLOBAL}hydra: {{job_logging: {{handlers: {{x: {{class: logging.FileHandler, filename: written}}}}}}}}\n",
    f"{GLOBAL}hydra: {{hydra_logging: {{handlers: {{x: {{class: logging.FileHandler, filename: written}}}}}}}}\n",
    f"{GLOBAL}hydra: {{sweep: {{dir: elsewhere, subdir: ../../x}}, run: {{dir: there}}}}\n",
    f"{GLOBAL}hydra: {{job: {{chdir: true, env_set: {{ZEROBENCH_CANARY: sang}}}}}}\n",
    f"{GLOBAL}hydra: {{output_subdir: x}}\n",
    f"{GLOBAL}defaults: [{{override /hydra/launcher: joblib}}]\n", f"{GLOBAL}defaults: [mine]\n",
    f"{GLOBAL}defaults: 3\n",
    f"{GLOBAL}defaults: [/experiment/mine]\n", f"{GLOBAL}defaults: [../../etc/passwd]\n",
    f"{GLOBAL}defaults: [nothing]\n",
    f"{GLOBAL}defaults: [{{override /strategy: nothing}}]\n", f"{GLOBAL}defaults: [{{/model@hydra: gpt_tiny}}]\n",
    f"{GLOBAL}defaults: [/experiment/deep/er]\n", f"{GLOBAL}model: {{_target_: tests.fuzz.canary.sing}}\n",
    f"{GLOBAL}model: null\n", f"{GLOBAL}model: 3\n", f"{GLOBAL}model: [1]\n", f"{GLOBAL}strategy: null\n",
    f"{GLOBAL}data: x\n",
    f"{GLOBAL}measure: null\n", f"{GLOBAL}launch: 3\n", f"{GLOBAL}search: []\n", f"{GLOBAL}results_dir: null\n",
    f"{GLOBAL}results_dir: 3\n", f"{GLOBAL}strategy: {{name: zero9}}\n", f"{GLOBAL}model: {{kind: nothing}}\n",
    f"{GLOBAL}optimizer: {{name: '???'}}\n", f"{GLOBAL}precision: {{name: int8}}\n", f"{GLOBAL}data: {{name: []}}\n",
    f"{GLOBAL}seed: ${{seed}}\n", f"{GLOBAL}seed: ${{oc.env:HOME}}\n", f"{GLOBAL}x: ${{x}}\nseed: 1\n",
    f"{GLOBAL}seed: .nan\n",
    f"{GLOBAL}clip: .inf\n", f"{GLOBAL}clip: .nan\n", f"{GLOBAL}seed: {'9' * 5000}\n", f"{GLOBAL}{LAUGHS}\n",
    f"{GLOBAL}x: {'[' * 3000}", f"{GLOBAL}seed: !!python/object/apply:tests.fuzz.canary.sing []\n",
    f"{GLOBAL}a: &a [*a]\n",
    f"{GLOBAL}seed: 1\nseed: 2\n", f"{GLOBAL}1: 2\n", f"{GLOBAL}true: x\n", f"{GLOBAL}null: x\n",
    f"{GLOBAL}? [1, 2]\n: 3\n",
    f"{GLOBAL}2026-01-01: 2026-01-01\n", f"{GLOBAL}'': 1\n", f"{GLOBAL}'a.b': 1\n", f"{GLOBAL}'${{seed}}': 1\n",
    f"{GLOBAL}seed: 0o17\nsequence: 0x10\nbatch: 1_0\n", f"{GLOBAL}seed: 12:30\n", f"{GLOBAL}seed: !!binary aGk=\n",
    "", "3", "[1, 2]", "- seed: 1", "seed", "\x00", "\t", "seed: [", "%YAML 9.9\n---\nseed: 1", "--- 1\n--- 2\n",
    "\ufeffseed: 1\n",
    "# @package x.y\nseed: 1\n", "# @package\n", "# @package hydra\nmode: RUN\n", "# @package _group_\nname: x\n",
    "defaults: [gpt_tiny]\n", "defaults: [schema/model/gpt]\nlayers: 1\n",
    "defaults: [/schema/model/gpt]\nlayers: 2\nhidden: 64\nheads: 2\n",
    "defaults: [/schema/strategy/zero1]\nname: ddp\n", "name: x\n", "kind: gpt\n", "layers: -1\n", "layers: x\n",
    "_target_: tests.fuzz.canary.sing\n", "defaults: [/schema/model/gpt, mine]\n", "defaults:\n- _self_\n- _self_\n",
)  # fmt: skip
"""Contents of files in a config folder."""
