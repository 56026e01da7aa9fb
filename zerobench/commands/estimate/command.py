"""`zerobench estimate`: memory and traffic of strategies, side by side, before any run.

question    the command line's cells, with the keys and defaults of a sweep except for DEFAULTS, and the device that
            they are simulated for; that device need not be in this machine
execution   one rank of each on fake tensors, in its own process (zerobench/fake_execution)
row         its figures (row.py), shown as tables and written as JSON or CSV (show.py), drawn (figure.py)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config.cell import Cell
from ...config.compose import RefusedError, compose_cells
from ...config.flat import name_strategies
from ...fake.as_gpu import ATTENTION_KERNELS
from ...fake_execution import Execution, Limits, Target, execute_all
from ...fake_execution.execute import KINDS, steps_of
from ...host.environment import FAKE, SIMULATED
from ...host.pipes import print_note
from ...host.terminal import progress_bar
from ...results.options import Parser, add_cells, verb
from ...sizes import parse_memory
from .row import LARGEST, EstimateRow, rows_of
from .show import FORMATS, show, write

DEFAULTS = {"strategy": "ddp,zero1,zero2,zero3,fsdp2", "world_size": "8", "data": "synthetic"}
"""Key -> its values if the command line does not set it."""

PLACED = {"device": "cpu", "backend": SIMULATED, "tensors": FAKE}
"""Keys that an estimate sets itself."""

DEVICE = "cuda"
"""The default device to estimate for: memory is scarce there."""


@dataclass(frozen=True)
class Question:
    """`words`: the command line without options. `target`: the device that `cells` are simulated for."""

    words: tuple[str, ...]
    cells: tuple[Cell, ...]
    target: Target


def ask(
    words: Sequence[str], device: str | None = None, attention: str | None = None, defaults: dict[str, str] = DEFAULTS
) -> Question:
    """Returns the cells of a command line. Raises RefusedError, or ValueError if it is wrong."""
    said = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    for key in ("backend", "tensors"):
        if key in said:
            raise ValueError(f"{key}={said[key]}: an estimate runs no ranks; leave {key} out")
    if said.get("search.memory_limit"):
        raise ValueError("search.memory_limit: a search runs cells; zerobench plan searches over estimates")
    device = device or said.get("device") or DEVICE
    target = Target("cpu" if device == "auto" else device, attention)
    own = {} if "experiment" in said else {key: value for key, value in defaults.items() if key not in said}
    keys = [f"{key}={value}" for key, value in (own | PLACED).items()]
    kept = [word for word in words if not word.startswith("device=")]
    cells = compose_cells(["-m", *keys, *kept])
    if not cells:
        raise RefusedError(["these words make no cell; zerobench estimate --help shows some that do"])
    # with the target's defaults, cells which differ only there stay two cells
    placed = (cell if cell.problems else replace(cell, config=target.defaults(cell.config)) for cell in cells)
    return Question(tuple(words), tuple(placed), target)


# -- the verb --------------------------------------------------------------------------------------


DESCRIPTION = """\
Will it fit, and under which strategy? Simulates the rank of each cell that needs the most memory, on fake tensors, with
the code of a run: our engine, DDP, FSDP2. Offline; no weights, no GPU, no results folder; seconds per cell.
"""

EXAMPLES = f"""\
KEY=VALUE as for a sweep, several values comma-separated; `zerobench --help KEY` explains each key. Defaults here:
  {"  ".join(f"{key}={value}" for key, value in DEFAULTS.items() if key != "data")}

  zerobench estimate model=gpt2_124m precision=bf16 sequence=1024
  zerobench estimate model=zero_7_5b world_size=64 precision=bf16 activation=checkpoint --device-memory "80 GiB"
  zerobench estimate model=gpt2_1_5b strategy=zero2,zero3 offload=none,cpu micro_batch=1,8 precision=bf16
  zerobench estimate model=llama_8b world_size=64 precision=bf16 sequence=4096 micro_batch=1 activation=checkpoint
  zerobench estimate model=huggingface huggingface.config=path/to/config.json precision=bf16 --attention flash
  zerobench estimate model=gpt2_124m --format json --out estimates.json --figure estimates.svg
  python mine.py estimate model=mine strategy=ddp,zero3            (a script that registers your model)

How to read it: peak is the largest sum of live bytes at any instant, on the rank with the largest sum; the parts below
it add up to it. states have an instant of their own; formula is the paper's closed form for them, in flight the rest:
gathered units, buckets, temporaries of the update. volume is elements sent per step over the number of parameters.
Exit code: 0 all cells were simulated, 1 a cell was not, 2 the command is invalid, 130 interrupted.
"""


@verb
def estimate(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    chosen = _parser().parse_intermixed_args(arguments)
    try:
        memory = parse_memory(chosen.device_memory, "--device-memory: ") if chosen.device_memory else None
        _check(chosen)
        words = [*(["--config-dir", chosen.config_dir] if chosen.config_dir else []), *chosen.overrides]
        question = ask(words, chosen.device, chosen.attention)
        rows = estimate_all(question, chosen.jobs, chosen.timeout, chosen.tensors)
    except KeyboardInterrupt:
        print_note("zerobench estimate: stopped; nothing is written")
        return 130
    if chosen.format == "table" and chosen.out is None:
        show(rows, memory)
    else:
        write(rows, chosen.format, chosen.out, memory)
    if chosen.figure is not None:
        from .figure import draw  # matplotlib takes a second

        draw(rows, chosen.figure, memory)
    return int(any(row.problem for row in rows))


def estimate_all(
    question: Question, jobs: int | None = None, timeout_s: float = Limits().seconds, tensors: int = LARGEST
) -> list[EstimateRow]:
    """Simulates the cells of a question, with progress on standard error, and returns a row for each."""
    sound = [cell for cell in question.cells if not cell.problems]
    names = name_strategies([cell.config for cell in question.cells])
    sound_names = [name for name, cell in zip(names, question.cells, strict=True) if not cell.problems]
    configs = [cell.config for cell in sound]
    steps, done = [steps_of(config) for config in configs], dict[int, int]()
    with progress_bar("estimate", sum(steps), "steps") as show_done:

        def tell(number: int, news: dict[str, Any] | Execution) -> None:
            ended = isinstance(news, Execution)
            done[number] = steps[number] if isinstance(news, Execution) else news["step"]
            show_done(sum(done.values()), name=sound_names[number] if ended else "")

        found = execute_all(configs, question.target, jobs, tell, Limits(seconds=timeout_s))
    by_cell = {cell.cell_id: one for cell, one in zip(sound, found, strict=True)}
    return rows_of(question.cells, names, by_cell, question.target, tensors)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("zerobench estimate", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add_cells(parser, Limits().seconds)
    add("--device", choices=KINDS, help=f"device to estimate for; this machine need not have it (default: {DEVICE})")
    words = "attention kernel on a GPU (default: the one that torch chooses)"
    add("--attention", choices=ATTENTION_KERNELS, help=words)
    words = 'memory of one GPU, such as "80 GiB": shows which cells fit, and by how much'
    add("--device-memory", metavar="SIZE", help=words)
    words = "show the K largest tensors at the peak of each cell (default: %(default)s)"
    add("--tensors", type=int, default=LARGEST, metavar="K", help=words)
    add("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="write to FILE instead of standard output")
    add("--figure", type=Path, metavar="FILE", help="stacked bars by part: .svg, .png or .pdf")
    return parser


def _check(chosen: argparse.Namespace) -> None:
    if chosen.tensors < 0:
        raise ValueError(f"--tensors {chosen.tensors}: must be at least 0")
    for flag, path in (("--out", chosen.out), ("--figure", chosen.figure)):
        if path is not None and path.is_dir():
            raise ValueError(f"{flag} {path}: is a folder; name a file")
    if chosen.figure is not None and chosen.figure.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--figure {chosen.figure}: name a file that ends in .svg, .png or .pdf")
