"""Seals values: only processes with the job's secret can read them, and values written by others are detected.

sealed value    nonce (16 bytes), data XOR stream, tag (32 bytes)
stream          SHAKE-256 of a key and the nonce: never reused, since each value has a new nonce
tag             HMAC-SHA256, with a second key, of the value's name, the nonce and the encrypted data
keys            HMAC-SHA256 of a purpose and a context, with the secret; the context is one round of one job

Encrypt-then-MAC with primitives of the standard library. The tag covers the name, so a value moved to another name is
rejected like a forged one.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import shake_256

NONCE_BYTES, TAG_BYTES = 16, 32


class ForeignError(ValueError):
    """Raised if a value was not sealed under this name with this secret."""


class Seal:
    """Seals and opens values with keys derived from `secret`."""

    def __init__(self, secret: bytes, context: str) -> None:
        self._hiding, self._proving = (
            hmac.digest(secret, f"zerobench {purpose} {context}".encode(), "sha256") for purpose in ("hiding", "proof")
        )

    def close(self, name: str, data: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        hidden = nonce + self._masked(nonce, data)
        return hidden + self._tag(name, hidden)

    def open(self, name: str, sealed: bytes) -> bytes:
        """Returns the data of the value called `name`. Raises ForeignError if it was not sealed with this name and
        secret.
        """
        hidden, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if len(hidden) < NONCE_BYTES or not hmac.compare_digest(tag, self._tag(name, hidden)):
            raise ForeignError(name)
        return self._masked(hidden[:NONCE_BYTES], hidden[NONCE_BYTES:])

    def _tag(self, name: str, hidden: bytes) -> bytes:
        return hmac.digest(self._proving, f"{len(name.encode())} {name} ".encode() + hidden, "sha256")

    def _masked(self, nonce: bytes, data: bytes) -> bytes:
        stream = shake_256(self._hiding + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")
