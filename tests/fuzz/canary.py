"""Code that a hostile config or file names. It is not to be imported: that it was is a finding."""

import os


def sing(*_: object, **__: object) -> None:
    """Leaves a word in the environment."""
    os.environ["ZEROBENCH_CANARY"] = "sang"


class Canary:
    """A class whose object is made by a call of `sing`, as a pickle can say it."""

    def __init__(self, *_: object, **__: object) -> None:
        sing()

    def __reduce__(self) -> tuple[object, ...]:
        return sing, ()
