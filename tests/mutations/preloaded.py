"""A process with the libraries loaded that most tests import, none of the project's own: it forks one pytest a request.

Loading them takes most of the time of a small test. A request is a line of JSON on stdin, {"folder", "said", "flags"};
the answers are lines on stdout: the number of the process that has begun, and its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

LIBRARIES = (
    "torch", "torch.distributed", "numpy", "pandas", "pyarrow.parquet", "scipy.stats", "hydra", "omegaconf", "yaml",
    "rich.table", "psutil", "pytest",
)  # fmt: skip


def main(libraries: Sequence[str]) -> None:
    for name in libraries:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            run(request)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def run(request: dict[str, Any]) -> None:
    """Runs pytest in a session of its own, in `folder`, and ends the process; its words go to the file `said`."""
    code = 1
    try:
        os.setsid()
        os.chdir(request["folder"])
        said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for place, file in enumerate((nothing, said, said)):
            os.dup2(file, place)
        os.environ |= {"PYTHONPATH": request["folder"], "COLUMNS": "200"}
        sys.path.insert(0, request["folder"])
        import pytest

        # What is loaded cannot be rewritten for pytest's words, which pytest would say of its plugins' libraries.
        code = int(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *request["flags"]]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
