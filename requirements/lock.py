"""Writes the locks beside this file again: every package that CI installs, with the SHA-256 of each of its files.

    make lock

build.txt      tools that build packages from source, installed first
torch.txt      torch alone, tried from the disk first: given hashes, pip prefers PyPI's build to one that it finds there
ci.txt         the extra `dev` without torch, at the versions of constraints.txt
docs.txt       further packages of the extra `docs`; browser.txt, of `browser`
cuda.txt       libraries that torch's builds for CUDA need and its builds for the CPU do not
triton.txt     one of them, which interprets our kernels on a CPU

uv resolves for all platforms and all Pythons from PYTHON on. torch's CPU builds are not on PyPI: where pip is set up to
find one (find-links), its hash is added to those of PyPI's, and it stays as long as the version does.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
CONSTRAINTS = ROOT / "constraints.txt"

PYTHON = "3.11.5"
"""The first that all packages support: pymdown-extensions asks for it."""

BUILD = "setuptools>=70\nwheel>=0.43\nhatchling>=1.25\neditables>=0.3\n"

CUDA = re.compile("nvidia-|cuda-|triton$")
"""Names of what torch's builds for CUDA need."""

ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? ?\\?$")

HEAD = "# Written by requirements/lock.py: `make lock` writes it again. Install with --require-hashes --no-deps.\n"


@dataclass
class Pin:
    """A package: its version, an environment marker or none, and the hashes of its files."""

    version: str
    marker: str | None
    hashes: set[str] = field(default_factory=set)


Lock = dict[str, list[Pin]]
"""Name -> its pins; several only where markers tell them apart."""


def read(text: str) -> Lock:
    """Reads what uv and `write` write."""
    found: Lock = defaultdict(list)
    pin = Pin("", None)
    for line in text.splitlines():
        if entry := ENTRY.match(line):
            pin = Pin(entry["version"], entry["marker"])
            found[entry["name"].lower()].append(pin)
        elif digest := re.search("--hash=(sha256:[0-9a-f]{64})", line):
            pin.hashes.add(digest[1])
    return dict(found)


def write(path: Path, lock: Lock) -> None:
    """Writes a lock in the order of names."""
    lines = []
    for name, pins in sorted(lock.items()):
        for pin in pins:
            marker = f" ; {pin.marker}" if pin.marker else ""
            hashes = " \\\n".join(f"    --hash={digest}" for digest in sorted(pin.hashes))
            lines.append(f"{name}=={pin.version}{marker} \\\n{hashes}\n")
    path.write_text(HEAD + "".join(lines))


def compiled(source: str, *options: str, given: str | None = None) -> Lock:
    """Resolves `source`, or the lines `given`, with uv under the constraints."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--universal", "--python-version", PYTHON,
               "--no-header", "--no-annotate", "--constraints", str(CONSTRAINTS), *options, source]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return read(done.stdout)


def beyond(more: Lock, ci: Lock) -> Lock:
    """Returns what a further extra adds to ci.txt, packages that ci.txt installs on some platforms only among it."""
    everywhere = {name for name, pins in ci.items() if any(pin.marker is None for pin in pins)}
    return {name: pins for name, pins in more.items() if name not in everywhere and pins != ci.get(name)}


def torch_hashes(version: str) -> set[str]:
    """Returns the hashes of torch's wheels in the folders that pip is configured to look in (find-links), and those
    that the lock has.
    """
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    folders = {one for links in re.findall("find-links='([^']+)'", told.stdout) for one in links.split()}
    wheels = [wheel for folder in folders for wheel in Path(folder).glob(f"torch-{version}+*.whl")]
    known = read((HERE / "torch.txt").read_text()).get("torch", []) if (HERE / "torch.txt").exists() else []
    found = {digest for pin in known if pin.version == version for digest in pin.hashes}
    return found | {f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in wheels}


def main() -> None:
    """Writes all locks."""
    ci = compiled("pyproject.toml", "--extra", "dev")
    [torch] = ci["torch"]
    torch.hashes |= torch_hashes(torch.version)
    files = {
        "build.txt": compiled("-", given=BUILD),
        "torch.txt": {"torch": [torch]},
        "ci.txt": {name: pins for name, pins in ci.items() if name != "torch" and not CUDA.match(name)},
        "cuda.txt": {name: pins for name, pins in ci.items() if CUDA.match(name)},
        "triton.txt": {"triton": ci["triton"]},
    }
    for extra in ("docs", "browser"):
        files[f"{extra}.txt"] = beyond(compiled("pyproject.toml", "--extra", extra), ci)
    for name, lock in files.items():
        write(HERE / name, lock)
        print(f"requirements/{name}: {len(lock)} packages")


if __name__ == "__main__":
    main()
