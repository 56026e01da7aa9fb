"""`zerobench estimate`: memory and traffic of strategies, side by side, before any run.

Simulates one rank of each cell of a command line (simulated.py), shows the figures as tables or writes them as JSON or
CSV (show.py), and draws them (figure.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...fake.as_gpu import ATTENTION_KERNELS
from ...fake_execution import Limits
from ...fake_execution.execute import KINDS
from ...host.pipes import print_note
from ...results.options import Parser, add_cells, verb
from ...sizes import parse_memory
from ..simulated import DEFAULTS, DEVICE, LARGEST, ask, simulate
from .show import FORMS, show, write_text

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
    memory = parse_memory(chosen.device_memory, "--device-memory: ") if chosen.device_memory else None
    if chosen.tensors < 0:
        raise ValueError(f"--tensors {chosen.tensors}: must be at least 0")
    for flag, path in (("--out", chosen.out), ("--figure", chosen.figure)):
        if path is not None and path.is_dir():
            raise ValueError(f"{flag} {path}: is a folder; name a file")
    if chosen.figure is not None and chosen.figure.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--figure {chosen.figure}: name a file that ends in .svg, .png or .pdf")
    try:
        words = [*(["--config-dir", chosen.config_dir] if chosen.config_dir else []), *chosen.overrides]
        question = ask(words, chosen.device, chosen.attention)
        cells = simulate("estimate", question, chosen.jobs, chosen.timeout, chosen.tensors)
    except KeyboardInterrupt:
        print_note("zerobench estimate: stopped; nothing is written")
        return 130
    if chosen.format == "table" and chosen.out is None:
        show(cells, memory)
    else:
        write_text(FORMS[chosen.format](cells, memory), chosen.out)
    if chosen.figure is not None:
        from .figure import draw  # matplotlib takes a second

        draw(cells, chosen.figure, memory)
    return int(any(cell.problem for cell in cells))


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
    add("--format", choices=FORMS, default="table", help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="write to FILE instead of standard output")
    add("--figure", type=Path, metavar="FILE", help="stacked bars by part: .svg, .png or .pdf")
    return parser
