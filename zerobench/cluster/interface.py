"""Addresses and interfaces of a job's sockets: each listens on the network of the job's other processes only.

address      MASTER_ADDR, resolved: rank 0's machine as the other ranks reach it
interface    that of this machine through which packets to the address go

torch's store would listen on every interface. It takes a socket that listens already: ours is bound to the address.
"""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

LISTEN_AT = "ZEROBENCH_INTERFACE"
"""Variable that names rank 0's interface, or an address of it, where MASTER_ADDR is none of its machine (NAT)."""

ELSEWHERE = "198.51.100.1"
"""An address for documents (RFC 5737), on no network. A route to it is the default route; nothing is sent there."""

_DISCARD_PORT = 9


def reachable(address: str) -> str:
    """Returns `address`, or, for a name that on its own machine means loopback (Debian's /etc/hosts), this machine's
    address on its default route, which is what other machines take the name for.
    """
    if _is_number(address) or address.split(".")[0] == "localhost":
        return address
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return address  # the connection fails with an error message
    return (_own_address(ELSEWHERE) or address) if all(ip_address(one).is_loopback for one in found) else address


def listening_socket(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at `address`, or where LISTEN_AT says, and nowhere else. Raises OSError."""
    at = os.environ.get(LISTEN_AT) or address
    at = _addresses_of_interfaces().get(at, [at])[0]
    family, kind, protocol, _, place = socket.getaddrinfo(at, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def interface_toward(address: str) -> str | None:
    """Returns the name of the interface through which this machine reaches `address`; None if it has no route."""
    mine = _own_address(reachable(address))
    return next((name for name, known in _addresses_of_interfaces().items() if mine in known), None)


def _own_address(peer: str) -> str | None:
    """Returns this machine's address on the route to `peer`. Connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(peer, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.connect(place)
            return str(one.getsockname()[0])
    except OSError:
        return None


def _addresses_of_interfaces() -> dict[str, list[str]]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in known if one.family in families]
        for name, known in psutil.net_if_addrs().items()
        if any(one.family in families for one in known)
    }


def _is_number(address: str) -> bool:
    try:
        ip_address(address)
    except ValueError:
        return False
    return True
