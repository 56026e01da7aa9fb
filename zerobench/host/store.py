"""Communication between the processes of a job: JSON values under keys in the job's store, and heartbeats.

store        torch's TCPStore at MASTER_ADDR:MASTER_PORT, below our own prefix. Like torch's own jobs, zerobench trusts
             every process that can connect to it (SECURITY.md)
value        JSON, never a pickle, compressed, in pieces within the store's size limit
number       a sum
heartbeat    a value that a thread of each process keeps replacing by a larger number; if it stops, the process is lost

address      MASTER_ADDR, resolved: the address at which other ranks reach rank 0's machine
interface    this machine's interface for packets to the address. torch's store would listen on every interface, but
             accepts a listening socket: ours is bound to the address

torch's create_c10d_store is not used: it blocks Ctrl-C until its timeout, here minutes. Nor are heartbeats of
torchrun's agents: agents inform each other, but not the processes that they start, and srun and mpirun have no agents.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from errno import EADDRNOTAVAIL
from ipaddress import ip_address
from itertools import count
from typing import Any

from .pipes import print_note

PIECE_CHARS = 4 * 2**20
"""Size of a piece; the store rejects values above 8 MiB."""

JOIN_S = 300.0
"""Seconds for all processes of a job to join."""

BEAT_S = 2.0
SILENCE_S = 30.0
"""Seconds without a heartbeat after which a process counts as lost. This covers every way to die, since a machine
without power closes no connection. It is long enough for a process on a busy machine.
"""

NOTE_S = 10.0
"""Seconds of waiting for other processes after which a process says so."""

POLL_S = 0.1

_TRY_S = 10.0


class LostError(RuntimeError):
    """Raised if the job, or part of it, cannot be reached, with the message for the user."""


class JobStore:
    """A connection to the job's store. `host`: this process hosts the store. Every method raises LostError."""

    def __init__(self, address: str, port: int, prefix: str, host: bool = False, patience_s: float = JOIN_S) -> None:
        from torch.distributed import PrefixStore

        self.address = f"{address}:{port}"
        self._store = PrefixStore(prefix, _connect(address, port, host, patience_s))

    def post(self, key: str, value: Any) -> None:
        """Stores a value under `key`; when this returns, all processes can read it, never a part of it."""
        text = b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()
        pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
        with self._asking():
            for number, piece in enumerate(pieces[1:], 1):
                self._store.set(f"{key}/{number}", piece)
            self._store.set(key, f"{len(pieces)} {pieces[0]}")
            # The store does not acknowledge `set`; an answer to a later request proves that it was processed.
            self._store.check([key])

    def has(self, key: str) -> bool:
        with self._asking():
            return bool(self._store.check([key]))

    def read(self, key: str) -> Any:
        """Returns the value under `key`, or None. Raises LostError if it is not zerobench's."""
        if not self.has(key):
            return None
        try:
            with self._asking():
                count, _, first = self._store.get(key).partition(b" ")
                more = [f"{key}/{number}" for number in range(1, int(count))]
                if more and not self._store.check(more):
                    raise ValueError(f"{key} lacks some of its pieces")
                data = b64decode(b"".join([first, *(self._store.get(piece) for piece in more)]), validate=True)
            return json.loads(zlib.decompress(data))
        except (ValueError, zlib.error) as error:
            message = f"the value of {key} in the job's store at {self.address} is not one that zerobench has written"
            raise LostError(f"{message}: another program uses this MASTER_ADDR and MASTER_PORT") from error

    def take(self, key: str) -> Any:
        """Returns the value under `key`, or None, and removes it; for keys that only one process reads."""
        value = self.read(key)
        if value is not None:
            self.drop(key)
        return value

    def drop(self, key: str) -> None:
        """Removes the value or number under `key`, which no process reads anymore."""
        with self._asking():
            self._store.delete_key(key)
            for number in count(1):
                if not self._store.delete_key(f"{key}/{number}"):
                    return

    def increment(self, key: str) -> int:
        """Adds 1 to the number under `key`, initially 0, and returns the sum."""
        with self._asking():
            return int(self._store.add(key, 1))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        from torch.distributed import DistError

        try:
            yield
        except DistError as error:
            raise LostError(f"the job's store at {self.address} does not answer") from error


def attempts(patience_s: float, missing: str) -> Iterator[None]:
    """Yields every POLL_S until `patience_s` are over, at least once. After NOTE_S it prints a line, once: what is
    `missing`, and how long this process will try.
    """
    begun, noted = time.monotonic(), False
    while True:
        yield
        if (waited := time.monotonic() - begun) > patience_s:
            return
        if waited >= NOTE_S and not noted:
            noted = True
            left = f"after {waited:.0f} s; this process tries for another {patience_s - waited:.0f} s"
            print_note(f"zerobench: {missing} {left}")
        time.sleep(POLL_S)


def _connect(address: str, port: int, host: bool, patience_s: float) -> Any:
    """Connects with short attempts: torch's own attempt returns only after its timeout, would block signals, and prints
    its C++ stack for every refused connection.
    """
    from torch.distributed import DistError, TCPStore

    if host:
        return _host(address, port)
    patience, cause = min(_TRY_S, patience_s), Exception()
    missing = f"there is no store at {address}:{port}"
    for _ in attempts(patience_s, missing):
        try:
            socket.create_connection((address, port), timeout=patience).close()
            return TCPStore(address, port, timeout=timedelta(seconds=patience), wait_for_workers=False)
        except (OSError, DistError) as error:
            cause = error
    message = f"{missing} ({_first_line(cause)}); do all processes have rank 0's MASTER_ADDR and MASTER_PORT?"
    raise LostError(message) from cause


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]


def _host(address: str, port: int) -> Any:
    """Hosts the store only at `address`. torch takes over the listening socket, and closes it."""
    from torch.distributed import DistError, TCPStore

    try:
        listener = listening_socket(address, port)
    except OSError as error:
        first = _first_line(error)
        if error.errno == EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            why = f"MASTER_ADDR={address}: is no address of rank 0's machine ({first})"
            advice = f"give one that it has, or name in {LISTEN_AT} its interface to which the others' packets come"
            raise LostError(f"{why}; {advice}") from error
        raise LostError(f"MASTER_PORT={port}: rank 0 cannot keep the job's store there: {first}") from error
    at = listener.getsockname()[0]
    try:
        return TCPStore(
            at, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_TRY_S),
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except DistError as error:
        first = _first_line(error)
        raise LostError(f"MASTER_PORT={port}: rank 0 cannot keep the job's store there: {first}") from error


class Heartbeat:
    """Posts one rank's heartbeats on its own connection from a thread, until it is stopped or the store is lost."""

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store, self._key, self._over = store, f"heartbeat/{rank}", threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which must not be inside torch's code when the interpreter shuts down."""
        self._over.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        with suppress(LostError):  # the thread that uses the store gets the error there
            for beat in count(1):
                if self._over.wait(BEAT_S):
                    return
                self._store.post(self._key, beat)


@dataclass
class _Heard:
    """A rank's last heartbeat, the time at which it came, and the time at which the store was last asked for it."""

    beat: int
    came: float
    asked: float


class HeartbeatMonitor:
    """Detects ranks whose heartbeat has stopped."""

    def __init__(self, store: JobStore, silence_s: float = SILENCE_S) -> None:
        self._store, self._silence_s = store, silence_s
        self._heard: dict[int, _Heard] = {}

    def silent(self, rank: int) -> bool:
        """Returns whether no new heartbeat of a rank has been observed for too long."""
        now = time.monotonic()
        heard = self._heard.setdefault(rank, _Heard(0, now, now - BEAT_S))
        if now - heard.asked >= BEAT_S / 2:
            heard.asked = now
            if (beat := self._store.read(f"heartbeat/{rank}") or 0) > heard.beat:
                heard.beat, heard.came = beat, now
        return now - heard.came > self._silence_s


LISTEN_AT = "ZEROBENCH_INTERFACE"
"""Variable with rank 0's interface, or its address, if MASTER_ADDR is not an address of its machine (NAT)."""

GLOO_AT = "GLOO_SOCKET_IFNAME"
"""Variable with the interface of gloo's sockets."""

ELSEWHERE = "198.51.100.1"
"""An address for documentation (RFC 5737), on no network: its route is the default route. Nothing is sent to it."""

_DISCARD_PORT = 9


def reachable(address: str) -> str:
    """Returns `address`, or, for a name that resolves to loopback on its own machine (Debian's /etc/hosts), this
    machine's address on its default route, to which other machines resolve the name.
    """
    with suppress(ValueError):
        ip_address(address)
        return address  # a number
    if address.split(".")[0] == "localhost":
        return address
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return address  # the connection fails with an error message
    is_loopback = all(ip_address(resolved).is_loopback for resolved in addresses)
    return (_own_address(ELSEWHERE) or address) if is_loopback else address


def listening_socket(address: str, port: int) -> socket.socket:
    """Returns a socket that listens only at `address`, or at LISTEN_AT if set. Raises OSError."""
    at = os.environ.get(LISTEN_AT) or address
    at = _addresses_of_interfaces().get(at, [at])[0]
    family, kind, protocol, _, endpoint = socket.getaddrinfo(at, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(endpoint)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def interface_toward(address: str) -> str | None:
    """Returns the name of the interface through which this machine reaches `address`; None if it has no route."""
    own = _own_address(reachable(address))
    return next((name for name, addresses in _addresses_of_interfaces().items() if own in addresses), None)


def check_gloo_interface() -> None:
    """Raises RuntimeError if gloo cannot use the interfaces that GLOO_SOCKET_IFNAME names."""
    interfaces, name = _addresses_of_interfaces(), os.environ.get(GLOO_AT, "")
    if missing := [wanted for wanted in name.split(",") if wanted and wanted not in interfaces]:
        others = f"those with an address are {', '.join(interfaces)}" if interfaces else "no interface has an address"
        raise RuntimeError(
            f"{GLOO_AT}={name}: no network interface {missing[0]} with an address on this machine, and gloo connects"
            f" the ranks through it; start it (ip link set {missing[0]} up) or name another ({others})"
        )


def _own_address(peer: str) -> str | None:
    """Returns this machine's address on the route to `peer`. Connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(peer, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(endpoint)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _addresses_of_interfaces() -> dict[str, list[str]]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.split("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.family in families for entry in entries)
    }
