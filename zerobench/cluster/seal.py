"""Seals of values: only processes with the job's secret can read one, and what others write is recognized.

sealed value    nonce (16 bytes), data XOR stream, tag (32 bytes)
stream          SHAKE-256 of a key and the nonce: never used twice, since each value has a new nonce
tag             HMAC-SHA256, under a second key, of the name of the value, the nonce and the hidden data
keys            HMAC-SHA256 of a purpose and a context, under the secret; the context is of one round of one job

Encrypt-then-MAC of the standard library's primitives. The name is under the tag, so that a value that is moved to
another name is as foreign as one that is made up.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import shake_256

NONCE_BYTES, TAG_BYTES = 16, 32


class ForeignError(ValueError):
    """Raised if a value was not sealed under this name with this secret."""


class Seal:
    """Closes and opens values with keys derived from `secret`."""

    def __init__(self, secret: bytes, context: str) -> None:
        self._hiding, self._proving = (
            hmac.digest(secret, f"zerobench {purpose} {context}".encode(), "sha256") for purpose in ("hiding", "proof")
        )

    def close(self, name: str, data: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        hidden = nonce + self._masked(nonce, data)
        return hidden + self._tag(name, hidden)

    def open(self, name: str, sealed: bytes) -> bytes:
        """Returns the data of the value called `name`. Raises ForeignError for another's."""
        hidden, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if len(hidden) < NONCE_BYTES or not hmac.compare_digest(tag, self._tag(name, hidden)):
            raise ForeignError(name)
        return self._masked(hidden[:NONCE_BYTES], hidden[NONCE_BYTES:])

    def _tag(self, name: str, hidden: bytes) -> bytes:
        return hmac.digest(self._proving, f"{len(name.encode())} {name} ".encode() + hidden, "sha256")

    def _masked(self, nonce: bytes, data: bytes) -> bytes:
        stream = shake_256(self._hiding + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")
