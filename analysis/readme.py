"""Writes the README's table from committed runs, so that no figure in it is typed by hand.

python analysis/readme.py [RUNS] [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zerobench import load  # noqa: E402
from zerobench.tables import latest  # noqa: E402

BEGIN = "<!-- table: results/reference/cpu, written by `make plots` -->"
END = "<!-- end of table -->"
MIB = 2**20


def table(where: Path) -> str:
    """The table in Markdown, and the line that says where it comes from."""
    runs = latest(load(where).runs)
    lines = [
        "| strategy | peak MiB | states MiB | predicted | volume ψ | predicted | step ms | tokens/s | loss |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for run in runs.itertuples():
        step = f"{run.step_s * 1000:.0f} ({run.step_s_low * 1000:.0f}–{run.step_s_high * 1000:.0f})"
        cells = [
            run.strategy,
            f"{run.peak_bytes / MIB:.1f}",
            f"{run.states_bytes / MIB:.1f}",
            f"{run.predicted_states_bytes / MIB:.1f}",
            f"{run.volume_psi:.3f}",
            f"{run.predicted_volume_psi:.3f}",
            step,
            f"{run.tokens_per_s:.0f}",
            f"{run.loss_last:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    first = runs.iloc[0]
    source = (
        f"{first.model}, ψ = {int(first.psi):,}, N = {first.world_size}, {first.batch} sequences of {first.sequence} "
        f"tokens a step, {first.precision}, {first.optimizer}; {first.cores} cores, "
        f"torch {first.torch_version}, {first.started[:10]}. Medians of the slowest rank with their 95 % "
        "intervals. `make reference` makes it again."
    )
    return "\n".join([BEGIN, "", *lines, "", source, "", END])


def main() -> int:
    """Rewrites the README; with --check only says whether it would change. Exit code 1 if so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=ROOT / "results/reference/cpu/stages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table is out of date")
    chosen = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    new = before + table(chosen.runs) + rest.split(END)[1]
    if chosen.check:
        return int(new != text)
    readme.write_text(new)
    print(f"table: {readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
