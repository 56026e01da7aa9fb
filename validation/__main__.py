"""`python -m validation NAME ...`: one proof; `make NAME` runs it and rewrites the pages that show its result."""

from __future__ import annotations

import sys
from importlib import import_module

from zerobench.config.compose import RefusedError
from zerobench.config.keys import nearest
from zerobench.host.signals import ENDING, ignore, interrupt_on, unclaimed
from zerobench.ranks import fork_server
from zerobench.results.options import Parser
from zerobench.sizes import printable

NAMES = {
    "table1": ("table1", "table 1 of the ZeRO paper, simulated up to 1T parameters on 1,024 ranks"),
    "published": ("published.command", "the papers' figures: formula, simulated, printed"),
    "published-runs": ("published_runs.peaks", "others' measured peaks and our estimates"),
    "predicted-runs": ("predicted_runs", "others' measured throughput and our predictions; fits the scales"),
    "fake-equality": ("equality", "every variant in real worlds and on fake tensors: differences"),
    "answer-times": ("answer_times", "how long the first commands take, before and after a change"),
    "certificates": ("certificates.command", "what certificates say of honest loops and of planted failures"),
    "gpu-suite": ("gpu_suite.command", "what this machine's GPU can do, in 8 minutes"),
    "kernel-ulps": ("kernel_ulps", "masters of our kernel of Adam's update beside torch's, interpreted on a CPU"),
    "update-traffic": ("update_traffic", "memory traffic and kernels of an update on a GPU, counted without one"),
    "one-gpu": (
        "one_gpu",
        "rates of one GPU, fitted to the steps of a suite; predictions for machines not yet measured",
    ),
    "gpu-runs": ("gpu_runs", "a GPU's peaks and steps beside estimates and predictions made without one"),
}
"""Name -> its module, which has `run` and, with options, `add_arguments`, and a line for the help."""

HELP = """\
usage: python -m validation NAME [OPTION ...]

Each proof takes cells, executes them on fake tensors or runs them, compares the figures with a number that somebody
else has printed or measured, and writes rows below results/. Rows that are there already are not made again, so that
a proof which was stopped goes on where it was.

{names}

Each explains itself: python -m validation NAME --help. `make NAME` runs it as the committed results were made.
Exit code: 0 all is as it should be, 1 something differs or could not be simulated, 2 a wrong command, 130 stopped.
"""


def main(arguments: list[str]) -> int:
    """Runs a proof and returns the exit code: see HELP."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(names="\n".join(f"  {name:<16}{line}" for name, (_, line) in NAMES.items())), end="")
        return 0
    name, *rest = arguments
    if name not in NAMES:
        print(printable(f"validation {name}: no such proof{nearest(name, list(NAMES))}"), file=sys.stderr)
        return 2
    module = import_module(f".{NAMES[name][0]}", __package__)
    parser = Parser(f"python -m validation {name}", module.__doc__)
    getattr(module, "add_arguments", lambda _: None)(parser)
    chosen = parser.parse_args(rest)
    try:
        with interrupt_on(unclaimed(ENDING)):
            code: int = module.run(chosen)
    except KeyboardInterrupt:
        print(f"validation {name}: stopped; the rows so far are kept", file=sys.stderr)
        return 130
    except (RefusedError, ValueError, OSError) as error:
        for problem in error.problems if isinstance(error, RefusedError) else [str(error)]:
            print(printable(f"validation {name}: {problem}"), file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    claimed = unclaimed(ENDING)
    try:
        exit_code = main(sys.argv[1:])
    finally:
        ignore(claimed)
        fork_server.end()
    sys.exit(exit_code)
