"""Sockets on which processes of a run listen, looked up in /proc again and again as long as the run goes on."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

LISTEN = "0A"
"""A socket's state in /proc/net/tcp."""


@dataclass(frozen=True)
class Listener:
    """An address that a process listens on. `program`: the last part of its command line's module or program."""

    address: IPv4Address | IPv6Address
    program: str

    @property
    def is_loopback(self) -> bool:
        mapped = getattr(self.address, "ipv4_mapped", None)
        return bool((mapped or self.address).is_loopback)


def listeners_of(process: psutil.Process) -> set[Listener]:
    """Reads the listening TCP sockets among a process's open files, in its own network namespace."""
    try:
        folder = Path(f"/proc/{process.pid}")
        opened = set(_links(folder / "fd"))
        lines = [line.split() for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()]
        program = " ".join(process.cmdline())
    except (OSError, psutil.Error):
        return set()  # it ended as it was looked at
    return {
        Listener(_address(fields[1].split(":")[0]), program)
        for fields in lines
        if fields[3] == LISTEN and f"socket:[{fields[9]}]" in opened
    }


def watch_listeners(
    parents: Callable[[], Iterable[int]], is_over: Callable[[], bool], every_s: float = 0.05
) -> set[Listener]:
    """Returns every listener of the parents' descendants, and of themselves, until `is_over`."""
    found: set[Listener] = set()
    while not is_over():
        for parent in parents():
            try:
                one = psutil.Process(parent)
                family = [one, *one.children(recursive=True)]
            except psutil.Error:
                continue
            for process in family:
                found |= listeners_of(process)
        time.sleep(every_s)
    return found


def _links(folder: Path) -> Iterator[str]:
    for one in folder.iterdir():
        with suppress(OSError):  # closed since, as the folder itself is where a process looks at its own
            yield os.readlink(one)


def _address(text: str) -> IPv4Address | IPv6Address:
    """Converts the kernel's hexadecimal words, each in the machine's (little-endian) order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ip_address(b"".join(words))
