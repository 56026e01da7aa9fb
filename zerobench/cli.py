"""The command line: a Hydra app, plus verbs.

    zerobench KEY=VALUE ...        one run            zerobench -m KEY=V1,V2 ...     a sweep
    zerobench VERB ...             see help.txt       zerobench                      help.txt

Exit code: 0 all cells ok, 1 a cell failed, 2 the command is invalid or no cell can run, 130 interrupted.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TextIO, TypeVar

from .host.job import ROWS, JobError, find_job
from .host.pipes import patient, print_note
from .host.revisions import installed_version
from .host.signals import ENDING, end_with_parent, exit_when_interrupted, ignore, interrupt_on, unclaimed
from .ranks import fork_server
from .results.options import choose, price, refuse

T = TypeVar("T")

VERBS = {
    "plan": "plan.command",
    "estimate": "estimate",
    "predict": "predict",
    "status": "status",
    "show": "show",
    "compare": "compare",
    "report": "report.command",
    "plot": "plot",
    "replay": "replay.command",
    "export": "export",
    "budget": "budget",
    "noise": "noise",
    "calibrate": "calibrate",
    "prune": "prune",
}
"""Verb -> module of commands/ that has a function of its name, with _ for -; imported on use."""

LAUNCHING = ("plan", "estimate", "predict", "budget", "noise", "calibrate")
"""Verbs whose cells run in processes of their own, from a fork server that loads while the verb is imported."""

REMOVED = {
    "table1": "make table1",
    "published": "make published",
    "estimate --published": "make published-runs",
    "predict --published": "make predicted-runs FILE=runs.csv",
    "versions": "docs/how-to/bisect-and-trends.md",
    "gpu-suite": "make gpu-suite",
    "bisect": "git bisect run zerobench budget check FILE",
    "history": "zerobench budget check --benchmark-json FILE",
    "sync": "rsync -a FROM/ TO/",
    "columns": "docs/reference/columns.md",
    "export --format wandb": "docs/how-to/exports.md",
}
"""Removed verb, or flag of a verb -> the command or page that replaces it; both `make` and pages need a checkout."""

QUIET = ("--quiet", "-q")

VERSIONS = ("zerobench", "torch", "hydra-core")
"""Packages that --version lists."""


def main() -> None:
    """Runs the console script and exits. Does nothing in a rank process, which imports a user's script again."""
    reimported = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    is_rank = reimported or multiprocessing.parent_process() is not None
    if not is_rank:
        sys.stdout, sys.stderr = patient(sys.stdout), patient(sys.stderr)
        warnings.showwarning = _print_warning
        ending = unclaimed(ENDING)
        try:
            code = run(sys.argv[1:])
        finally:
            ignore(ending)
            fork_server.end()
        if sys.stdout is not None:  # it was open when the process began
            sys.stdout.flush()
        sys.exit(code)


def _print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """Prints warnings for users (UserWarning) as a zerobench message, and others with their category."""
    print_note(f"zerobench: {message}" if category is UserWarning else f"{category.__name__}: {message}")


def run(arguments: list[str]) -> int:
    """Runs a command line and returns the exit code."""
    if ROWS in os.environ:  # in a launcher's job, whose plugin gets warning signals and may be killed alone
        end_with_parent()
        for warning in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(warning, signal.SIG_IGN)
    try:
        with interrupt_on(unclaimed(ENDING)):
            return _join(arguments)
    except KeyboardInterrupt:
        return 130


def _join(arguments: list[str]) -> int:
    """Runs a process of a job if the environment describes one: rank 0 acts, the others follow its orders."""
    try:
        job = find_job(os.environ)
    except JobError as error:
        return refuse(error)
    if job is None:
        return _act(arguments)
    with _importing():
        from .ranks.over_cluster import follow, lead

    return follow(job) if job.rank else lead(job, lambda: _act(arguments))


@contextmanager
def _importing() -> Iterator[None]:
    """Ends the process at an interruption in this block, which imports. The garbage collector does not visit the
    objects that imports make: that would be a fifth of a command's start.
    """
    collects, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        with exit_when_interrupted(fork_server.end):
            yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if collects:
            gc.enable()


def _act(arguments: list[str]) -> int:
    """Runs a command line; if interrupted without a message of its own, prints a last line."""
    try:
        return _run(arguments)
    except fork_server.NoFolderError as error:
        return refuse(error)
    except KeyboardInterrupt:
        verb = arguments[0] if arguments[:1] and arguments[0] in VERBS else ""
        print_note(f"zerobench {verb}: interrupted" if verb else "zerobench: interrupted; no launch was under way")
        return 130


def _run(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is a command of the user's
    if set(QUIET) & set(arguments[:end]):
        from .host.terminal import quiet

        with quiet():
            return _run([word for word in arguments[:end] if word not in QUIET] + arguments[end:])
    for name, command in REMOVED.items():
        verb, *removed_flags = name.split()
        if arguments[:1] == [verb] and {flag.partition("=")[0] for flag in arguments[:end]} >= set(removed_flags):
            in_checkout = " in a checkout of the project" if command.startswith(("make ", "docs/")) else ""
            print_note(f"zerobench {name}: removed; use `{command}`{in_checkout}")
            return 2
    if arguments and arguments[0] in VERBS:
        verb = arguments[0].replace("-", "_")
        launches = arguments[0] in LAUNCHING and not {"-h", "--help"} & set(arguments[:end])
        if launches:
            fork_server.start()
        with _importing():
            module = import_module(f".commands.{VERBS[arguments[0]]}", __package__)
            if launches:  # this process counts FLOPs of models, but compiles none
                import_module(".fake.compiler", __package__).stand_in()
        code: int = getattr(module, verb)(arguments[1:])
        return code
    return _sweep(arguments)


def _parsed(flag: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """Returns the value of a flag; None without one. Raises RefusedError for a wrong one, before anything runs."""
    from argparse import ArgumentTypeError

    from .config.compose import RefusedError

    try:
        return None if text is None else parse(text)
    except ArgumentTypeError as error:
        raise RefusedError([f"{flag}: {error}"]) from None


def _help(topics: list[str], extra_dirs: list[Path]) -> int:
    """Prints help for the whole command line, or for each of `topics`: a verb, a group, GROUP=CHOICE or a key."""
    from .config import help
    from .config.compose import make_composer

    if topics and topics[0] in VERBS:
        return _run([topics[0], "--help"])
    composer = make_composer(extra_dirs)
    try:
        shown = [help.of_word(topic, composer) for topic in topics]
    except ValueError as error:
        return refuse(error, "zerobench --help")
    print("\n\n".join(shown) or help.of_everything(composer))
    return 0


def _sweep(arguments: list[str]) -> int:
    if "--version" in arguments:  # ahead of the imports, since torch takes a second
        print(", ".join(f"{name} {installed_version(name) or 'not installed'}" for name in VERSIONS))
        return 0
    with _importing():
        from .config.flags import COLUMNS, PRICE, not_a_verb, only_compose, split_arguments, take_value, unknown_flags

    arguments, columns = take_value(arguments, COLUMNS)
    arguments, dollars = take_value(arguments, PRICE)
    flags, rest, extra_dirs = split_arguments(arguments)
    if not arguments or {"-h", "--help"} & set(flags) or rest[:1] == ["help"]:
        return _help([argument for argument in rest if argument != "help"], extra_dirs)
    if problems := not_a_verb(arguments, tuple(VERBS)) or unknown_flags(flags):
        return refuse(ValueError("; ".join(problems)))
    dry_run = "--dry-run" in arguments
    if not dry_run and only_compose(flags):
        fork_server.start()
    with _importing():
        from .config import help
        from .config.compose import RefusedError, compose, make_composer

    try:
        if set(help.COMPLETION_FLAGS) & set(flags):
            make_composer(extra_dirs)  # users' registered choices are valid too
            help.complete(rest, tuple(VERBS))
            return 0
        table = ".commands.dry_run" if dry_run else ".results.printed_table"
        chosen = _parsed(COLUMNS, columns, lambda text: choose(text, import_module(table, __package__).ALL_COLUMNS))
        per_hour = _parsed(PRICE, dollars, price)
        composed = compose([a for a in arguments if a != "--dry-run"], tuple(VERBS))
        if composed is None:
            return 0
        composed = replace(composed, price=per_hour)
        with _importing():
            from .commands.dry_run import plan_composed
            from .sweep.command import run_composed
        return (plan_composed if dry_run else run_composed)(composed, chosen)
    except RefusedError as refused:
        return refuse(refused)
