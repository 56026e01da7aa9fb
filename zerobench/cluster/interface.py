"""Addresses and interfaces of a job's sockets, each of which listens only on the network of the job's other processes.

address      MASTER_ADDR, resolved: the address at which other ranks reach rank 0's machine
interface    this machine's interface for packets to the address

torch's store would listen on every interface, but accepts a listening socket: ours is bound to the address.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

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
