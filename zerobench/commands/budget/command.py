"""`zerobench budget record` and `zerobench budget check`: measured values become limits, runs are
checked against them.
"""

from __future__ import annotations

from collections.abc import Callable

from ...results.options import refuse, verb
from .check import UNJUDGED, check
from .record import record

USAGE = """\
zerobench budget record [--file FILE] [--runs PATH] [--metrics A,B] [--time] [--dry-run] [-m] KEY=VALUE ...
zerobench budget check [FILE ...] [--runs PATH] [--strict] [--junit FILE] [--comment FILE] [KEY=VALUE ...]

record writes what cells need, and explains each limit that it changes; check runs them again (or takes --runs) and
says, a sentence each, what moved, and which line of code moved it. In a GitHub workflow it also annotates that line.
Bytes and volumes are compared exactly, both ways. Files are yaml: ceilings such as `states_bytes: <= 24 GiB`
may be written by hand:

  command: [-m, "strategy=zero1,zero2", model=gpt_tiny]    # what makes the cells
  environments:
    any:                                                   # or "cpu, torch 2.13", as record writes it
      cells:
        zero2 gpt_tiny N=2 b=8:                            # a cell's name, as zerobench status prints it
          limits: {states_bytes: <= 24 GiB, peak_bytes: 30 MiB ± 2 %}

More: zerobench budget record --help, zerobench budget check --help.
Exit code of check: 0 all within budget, or better; 1 a regression, a missing metric or cell (with --strict also an
improvement); 125 no verdict: no budget for this environment, or a cell could not run, so that `git bisect run` skips
the revision; 2 a wrong option; 130 interrupted.
"""


@verb
def budget(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    verbs: dict[str, Callable[[list[str]], int]] = {"record": record, "check": check}
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in verbs:
        what = f"{arguments[0]}: neither record nor check" if arguments else "record or check?"
        raise ValueError(f"{what}; see zerobench budget --help")
    try:
        return verbs[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        refuse(error, "budget")
        return UNJUDGED if arguments[0] == "check" else 2
