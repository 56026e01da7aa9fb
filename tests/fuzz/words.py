"""Values and whole contents that the fuzz writes into files."""

from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x",
    "x" * 10_000, "\ud800", "\x00", "\x1b[2J", "../../etc/passwd", "/dev/zero", "é", "${seed}", "None", "nan",
    "1e999", "9" * 5000,
    [], [1], ["a"], [[]], [None], {}, {"a": 1}, {"": None}, {"name": 3}, {"kind": []}, [float("nan")],
    {"a": {"b": {"c": []}}},
)  # fmt: skip
"""Values in files, in the place of others."""

TEXTS: tuple[bytes, ...] = (
    b"", b"\x00" * 64, b"\xff\xfe", b"null", b"[]", b"{}", b"3", b'"x"', b"[" * 3000, b'{"a":' * 3000, b"9" * 6000,
    b"NaN",
    b"{", b"a: &a [*a]", b"!!python/object/apply:tests.fuzz.canary.sing []", b"- [1, 2", b"\x80\x04.",
    b"PK\x03\x04", b"PAR1",
    b"\x1f\x8b\x08\x00", b"\xef\xbb\xbf{}", b"a,b\n1,2\n", b"id\n", b'"', b"\r\n", b"\n\n\n",
    "\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1,
    30))]).encode(),
)  # fmt: skip
"""Whole contents of files."""
