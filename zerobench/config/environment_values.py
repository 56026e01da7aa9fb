"""Values of environment variables in a config, `${oc.env:NAME}`: of those that the command line names, and no others.

A config folder from others could have any value of the environment, a password too, printed and written into runs. The
resolver itself refuses: a file can make its name of parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

RESOLVER = "oc.env"

_NAMED = re.compile(r"\$\{oc\.env:\s*(\w+)")


@contextmanager
def named_alone(words: Iterable[str]) -> Iterator[None]:
    """Lets configs read the environment variables that `words`, of a command line, name."""
    named = {name for word in words for name in _NAMED.findall(word)}

    def env(name: str, *default: Any) -> str | None:
        if name not in named:
            raise ValueError(
                f"a config reads the environment variable {name}; only a command line may, "
                f"as in KEY='${{oc.env:{name}}}'"
            )
        if name not in os.environ and not default:
            raise ValueError(f"the environment variable {name} is not set")
        return oc.env(name, *default)

    OmegaConf.register_new_resolver(RESOLVER, env, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)
