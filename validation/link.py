"""Two nodes on this machine: two network namespaces joined by a link of a given rate. Needs the rights of root.

A token bucket (tc tbf) at both ends holds the rate, in each direction by itself. The ranks of a launch are divided
over the nodes, and find their interface in GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

NAMESPACES = """
set -e
ip link set lo up
unshare -n sleep 1200 &
other=$!
trap 'kill $other' EXIT
while [ $(readlink /proc/$other/ns/net) = $(readlink /proc/self/ns/net) ]; do sleep 0.05; done
ip link add node0 type veth peer name node1 netns $other
ip addr add 10.77.0.1/24 dev node0
ip link set node0 up
there="nsenter -t $other -n"
$there ip link set lo up
$there ip addr add 10.77.0.2/24 dev node1
$there ip link set node1 up
"""
"""A shell's beginning, run in a namespace of its own: the first node is there, the second where `$there` leads."""

LINK = """
tc qdisc add dev node0 root tbf rate {rate}mbit burst 256kb latency 200ms
$there tc qdisc add dev node1 root tbf rate {rate}mbit burst 256kb latency 200ms
GLOO_SOCKET_IFNAME=node1 $there {command} 1 &
second=$!
GLOO_SOCKET_IFNAME=node0 {command} 0
wait $second
"""


def run_on_nodes(command: Sequence[str], gbit_s: float, timeout_s: float) -> None:
    """Runs `command` on both nodes, each with its number, 0 or 1, as the last argument.

    gbit_s: rate of the link, Gbit/s. Raises ValueError with the last line of standard error if either fails.
    """
    link = LINK.format(rate=round(1000 * gbit_s), command=shlex.join(command))
    done = subprocess.run(
        ["unshare", "-n", "bash", "-c", NAMESPACES + link],
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"over a link: {done.stderr.strip().splitlines()[-1:]}")
