"""Commands whose recorded output pages show: questions on memory, on adapters and on long sequences.

    python tools/docs/questions.py [NUMBER ...]

A file NUMBER.txt of RECORDED has a command, and what it printed. This script runs the commands, by default all, and
writes their output. For a new one write the file with its first line, `$ COMMAND`, and then run it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
RECORDED = HERE / "results/published/questions"

COLUMNS = "120"
"""Width of the recorded outputs."""


def output(number: str) -> str:
    """The block `output NUMBER`: the command and what it printed."""
    command, said = read(number)
    return f"```bash\n{command}\n```\n\n```text\n{said}\n```"


def read(number: str) -> tuple[str, str]:
    """Returns a command and its recorded output."""
    first, _, said = (RECORDED / f"{number}.txt").read_text().partition("\n")
    return first.removeprefix("$ "), said.strip("\n")


def record(number: str) -> int:
    """Runs a command and writes its output. Returns the exit code; a command that fails leaves its file as it is."""
    command, _ = read(number)
    program, *words = shlex.split(command)
    words = [sys.executable, *(["-m", "zerobench"] if program == "zerobench" else []), *words]
    environment = os.environ | {"COLUMNS": COLUMNS}
    done = subprocess.run(words, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        said = "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")
        (RECORDED / f"{number}.txt").write_text(f"$ {command}\n\n{said}\n")
    return done.returncode


def main() -> int:
    """Records the outputs again. Exit code 1 if a command failed."""
    numbers = sys.argv[1:] or sorted(path.stem for path in RECORDED.glob("*.txt"))
    failed = [number for number in numbers if record(number)]
    print(f"recorded {len(numbers) - len(failed)} of {len(numbers)}" + f"; failed: {', '.join(failed)}" * bool(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
