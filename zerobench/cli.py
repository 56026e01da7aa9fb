"""The command line: a Hydra app, with verbs beside it.

    zerobench KEY=VALUE ...        one run            zerobench -m KEY=V1,V2 ...     a sweep
    zerobench VERB ...             see VERBS

Exit code: 0 all cells ok, 1 a cell failed, 2 the command itself was wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

HELP = """\
zerobench: DDP or which ZeRO stage? Memory, communication and time of each, measured by one instrument.

One run:
  zerobench strategy=zero2 model=gpt_tiny world_size=2
A sweep, every combination; finished cells of the same code are reused:
  zerobench -m strategy=ddp,zero1,zero2,zero3 world_size=1,2,4
The main job, as `make bench` runs it:
  zerobench experiment=stages
What a command line composes to, without running it:
  zerobench strategy=zero3 --cfg job

Verbs:
  zerobench export [RUNS] --format csv|markdown [--out FILE]     tables of finished runs

Groups (GROUP=CHOICE):
{groups}

Keys and their defaults (KEY=VALUE); comments on them are in conf/ and zerobench/config.py:
{config}
Each run becomes a folder under results_dir: config.yaml, provenance.json, run.json, and steps, memory,
tensors and traffic as parquet files; zerobench.load(PATH) reads them into pandas.
Exit code: 0 all cells ok, 1 a cell failed, 2 the command itself was wrong, 130 interrupted.
Hydra's own flags (-m, --cfg job, --info, --config-dir, hydra/launcher=...): zerobench --hydra-help
"""

VERBS = {"export": ".export"}
"""Verb -> the module that holds a function of that name; imported when asked for."""


def main() -> None:
    """The console script; exits. In a rank process, which runs a user's script again to know it, it does nothing."""
    reimported = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    is_rank = reimported or multiprocessing.parent_process() is not None
    if not is_rank:
        sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line and returns the exit code."""
    if arguments and arguments[0] in VERBS:
        from importlib import import_module

        verb = arguments[0]
        code: int = getattr(import_module(VERBS[verb], __package__), verb)(arguments[1:])
        return code
    return _sweep(arguments)


def _sweep(arguments: list[str]) -> int:
    from .config import Model, config_dir, store_schemas
    from .models import registered_models, schema_of
    from .overrides import Overrides, split_arguments

    user_models = {name: schema_of(name, build, Model) for name, build in registered_models().items()}
    store_schemas(user_models)
    flags, overrides, extra_dirs = split_arguments(arguments)
    check = Overrides(config_dir(), list(user_models), extra_dirs)
    if {"-h", "--help"} & set(flags):
        print(HELP.format(groups=check.list_choices(), config=check.list_defaults()))
        return 0
    overrides = check.check(overrides, multirun=bool({"-m", "--multirun"} & set(flags)), verbs=list(VERBS))
    if check.problems:
        for problem in check.problems:
            print(f"zerobench: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="zerobench-") as folder:
        journal = Path(folder) / "rows.jsonl"
        code = _run_hydra([*flags, *overrides], journal, check.cells)
        return _conclude(journal, code)


def _run_hydra(arguments: list[str], journal: Path, cells: int) -> int:
    """Lets Hydra compose and launch the jobs. Returns 0, 2 for what Hydra refused, 130 for Ctrl-C."""
    import hydra

    from .config import config_dir
    from .console import Reporter

    app = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    before, sys.argv = sys.argv, ["zerobench", *arguments]
    terminate = signal.signal(signal.SIGTERM, _stop)
    try:
        app(partial(run_job, journal, Reporter(cells)))()
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return 2 if stop.code else 0
    except Exception as error:
        print(f"zerobench: {type(error).__name__}: {_first_line(error)}", file=sys.stderr)
        return 2
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, terminate)
    return 0


def _stop(_signal: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def run_job(journal: Path, reporter: Any, config: Any) -> None:
    """One job of Hydra's: a composed config becomes a row. Failed cells do not raise; the sweep goes on."""
    row: dict[str, Any] = dict.fromkeys(("strategy", "model", "world_size", "batch"), "?")
    reused, spoilt = False, "invalid"
    try:
        cell = _cell_of(config)
        spoilt = "crash"
        reporter.start(cell.title)
        row |= {key: cell.row_key(key) for key in row}
        from .cell import find_reusable, run_cell

        found = find_reusable(cell)
        reused = found is not None
        row = found or asdict(run_cell(cell, reporter.progress))
        row["results_dir"] = os.path.abspath(cell.config["results_dir"])
    except KeyboardInterrupt:
        reporter.end(row | {"status": "interrupted", "reason": "stopped by the user"}, reused=False)
        raise
    except Exception as error:  # the sweep goes on, and says what this cell was spoilt by
        row |= {"status": spoilt, "reason": f"{type(error).__name__}: {_first_line(error)}"}
    reporter.end(row, reused)
    with journal.open("a") as file:  # a launcher may run jobs in processes of its own
        file.write(json.dumps(row) + "\n")


def _cell_of(config: Any) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from .overrides import stray_keys
    from .resolve import resolve

    plain: Any = OmegaConf.to_object(config)
    return resolve(plain, HydraConfig.get().runtime.choices["model"], stray_keys(config))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _conclude(journal: Path, code: int) -> int:
    """Prints the table of what ran and returns the exit code."""
    from .console import print_table

    rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    if rows:
        print_table(rows)
        for folder in sorted({row["results_dir"] for row in rows if "results_dir" in row}):
            print(f"tables: {folder}   (zerobench.load, zerobench export)")
    if code:
        return code
    return int(any(row["status"] != "ok" for row in rows))
