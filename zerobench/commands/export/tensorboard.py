"""TensorBoard: a folder of event files per run. Values are written in double precision: bytes are exact.

Choices and results of each run are in the HParams tab too, so that runs are compared there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...results.tables import Results
from .scalars import choices_of, rows_of, said, scalars_of, summary_of

MISSING = (
    "--format tensorboard: TensorBoard is not installed; pip install tensorboard, or take --format wandb,"
    " which needs nothing"
)


def write(results: Results, out: Path) -> str:
    """Writes the runs that are ok below the folder `out`. Raises ValueError without TensorBoard or such runs."""
    try:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams
    except ImportError as error:
        raise ValueError(MISSING) from error
    rows = rows_of(results)
    words = said(results, len(rows), f"{len(rows)} runs in {out}; look at them with: tensorboard --logdir {out}")
    for run in rows:
        folder = out / run["run_id"]
        earlier = list(folder.glob("events.out.tfevents.*"))
        with SummaryWriter(str(folder)) as writer:
            for one in scalars_of(results, run):
                writer.add_scalar(one.tag, one.value, one.step, one.time, new_style=True, double_precision=True)
            metrics = {f"run/{name}": value for name, value in summary_of(run).items()}
            for name, value in metrics.items():
                writer.add_scalar(name, value, 0, new_style=True, double_precision=True)
            for part in hparams({key: _shown(value) for key, value in choices_of(run).items()}, metrics):
                writer._get_file_writer().add_summary(part)  # add_hparams would make a run of its own for each
        for path in earlier:  # of an earlier export: TensorBoard would draw both
            path.unlink()
    return words


def _shown(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
