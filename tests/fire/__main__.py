"""`python -m tests.fire`: a sweep of 200 cells under random kills, held against an undisturbed one."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.cluster.slurm import missing

from .campaign import Campaign
from .cells import COMMANDS, ONE
from .judge import judge
from .kinds import KINDS
from .nodes import nodes_of
from .report import write

HELP = """\
Runs a sweep undisturbed, then again under fire: at instants drawn by a seed, processes of the sweep are killed,
terminated, interrupted or stopped for a while, and the command is started again until it is done. Both results folders
must then be equal in every byte, volume and loss. A campaign that was stopped is taken up where it was.
"""


def main(arguments: list[str]) -> int:
    """Returns 0 where all campaigns are clean, 1 where one is not, 2 for a wrong command."""
    parser = argparse.ArgumentParser("python -m tests.fire", description=HELP)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="local", help=f"of {', '.join(KINDS)}, with commas between")
    parser.add_argument("--every", type=float, default=12.0, metavar="S", help="mean pause between two shots")
    parser.add_argument("--only", default=None, metavar="NAMES", help=f"of {', '.join(c.name for c in COMMANDS)}")
    parser.add_argument("--work", type=Path, default=Path("build/fire"), metavar="FOLDER", help="results folders")
    parser.add_argument("--out", type=Path, default=Path("results/fire"), metavar="FOLDER", help="the record")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--kinds {','.join(unknown)}: must be of {', '.join(KINDS)}")
    if any(KINDS[kind].on_slurm for kind in kinds) and (why := missing()):
        parser.error(f"--kinds {options.kinds}: no SLURM can be started here: {why}")
    table = {one.name: one for one in (*COMMANDS, *ONE)}
    names = options.only.split(",") if options.only else [one.name for one in COMMANDS]
    if unknown := sorted(set(names) - set(table)):
        parser.error(f"--only {','.join(unknown)}: must be of {', '.join(table)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    commands, clean = tuple(table[name] for name in names), True
    for kind in kinds:
        folder = f"{kind}-seed{options.seed}"
        with nodes_of(KINDS[kind]) as nodes:
            try:
                campaign = Campaign(options.work / folder, kind, options.seed, options.every, _say, nodes)
            except ValueError as error:
                parser.error(str(error))
            try:
                campaign.run_calm(commands)
                campaign.run_fired(commands)
                verdict = judge(campaign, campaign.sweep_once_more(commands))
            except KeyboardInterrupt:
                campaign.end_all()
                raise
        write(campaign, verdict, options.out / folder)
        print((options.out / folder / "summary.md").read_text())
        clean &= verdict.is_clean
    return 0 if clean else 1


def _say(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
