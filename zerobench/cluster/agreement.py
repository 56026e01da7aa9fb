"""Agreement of a job's processes on its secret, in the store, before any of their values is in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from . import secret
from .launchers import ask
from .munge import socket_of_slurm
from .seal import Seal
from .serialize import to_plain
from .store import JobStore


def agree_on_seal(
    store: JobStore, is_first: bool, by_slurm: bool, context: str, wait_for: Callable[[str], Any]
) -> tuple[Seal, str]:
    """Seals `store` from here on; returns the seal, and the session. Rank 0 offers a secret, the others take it and see
    that rank 0 has it. Raises SecretError, or what `wait_for` raises, which returns the value of a key of rank 0's.
    """
    socket = socket_of_slurm(ask) if by_slurm else None
    if is_first:
        offer, shared = secret.offer(os.environ, socket)
        store.post("offer", to_plain(offer))
    else:
        offer = secret.Offer.from_plain(wait_for("offer"))
        shared = secret.take(offer, os.environ, socket)
    seal = store.seal = Seal(shared, f"{context} {offer.session}")
    if is_first:
        store.post("proof", offer.session)
    else:
        wait_for("proof")
    return seal, offer.session
