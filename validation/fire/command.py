"""A sweep of 200 cells under random kills, compared with an undisturbed one.

Runs a sweep undisturbed, then again under fire: at instants drawn by a seed, processes of the sweep are killed,
terminated, interrupted or stopped for a while, and the command is started again until it is done. Both results folders
must then be equal in every byte, volume and loss. A campaign that was stopped is taken up where it was.

    python -m validation fire --seed 1 --kinds local,submitit_slurm --every 12
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .campaign import Campaign, nodes_of
from .commands import COMMANDS, KINDS, ONE
from .judge import judge, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="local", help=f"of {', '.join(KINDS)}, with commas between")
    parser.add_argument("--every", type=float, default=12.0, metavar="S", help="mean pause between two shots")
    parser.add_argument("--only", default=None, metavar="NAMES", help=f"of {', '.join(c.name for c in COMMANDS)}")
    parser.add_argument("--work", type=Path, default=Path("build/fire"), metavar="FOLDER", help="results folders")
    parser.add_argument("--out", type=Path, default=Path("results/fire"), metavar="FOLDER", help="the record")


def run(chosen: argparse.Namespace) -> int:
    """Runs the campaigns, one after the other. Returns 1 if one is not clean."""
    kinds, table = chosen.kinds.split(","), {one.name: one for one in (*COMMANDS, *ONE)}
    names = chosen.only.split(",") if chosen.only else [one.name for one in COMMANDS]
    for flag, given, known in (("--kinds", kinds, KINDS), ("--only", names, table)):
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"{flag} {','.join(unknown)}: must be of {', '.join(known)}")
    if any(KINDS[kind].on_slurm for kind in kinds):
        from tests.cluster.slurm import missing

        if why := missing():
            raise ValueError(f"--kinds {chosen.kinds}: no SLURM can be started here: {why}")
    commands, clean = tuple(table[name] for name in names), True
    for kind in kinds:
        folder = f"{kind}-seed{chosen.seed}"
        with nodes_of(KINDS[kind]) as nodes:
            campaign = Campaign(chosen.work / folder, kind, chosen.seed, chosen.every, _say, nodes)
            try:
                campaign.run_calm(commands)
                campaign.run_fired(commands)
                verdict = judge(campaign, campaign.sweep_once_more(commands))
            except KeyboardInterrupt:
                campaign.end_all()
                raise
        write(campaign, verdict, chosen.out / folder)
        print((chosen.out / folder / "summary.md").read_text())
        clean &= verdict.is_clean
    return 0 if clean else 1


def _say(words: str) -> None:
    print(words, flush=True)
