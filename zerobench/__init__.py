"""zerobench: DDP or which ZeRO stage? Memory, communication and time of each, measured by one instrument.

    zerobench.initialize(model, optimizer, strategy="zero2")   the engine as a library (zerobench.zero)
    zerobench.run(strategy=["ddp", "zero1"])                   a sweep from Python, as in a notebook (zerobench.sweep)
    zerobench.load("results/runs")                             finished runs as pandas tables (zerobench.results.tables)
    zerobench.load_calibration(FOLDER)                         what collectives cost (zerobench.ranks.collectives)
    zerobench.register_model("mine", build)                    a model of your own (zerobench.registry)
    zerobench.register_data("mine", build)                     data of your own, of any kind (zerobench.registry)
    zerobench.register_strategy("mine", build)                 a strategy of your own (zerobench.strategies)
    zerobench.watch(model, optimizer)                          a training loop of your own (zerobench.watching)
    zerobench.watch(..., verify=ExpectedTraining())            the same, and: is it the same training?
    zerobench.trainer_callback(), lightning_callback()         the same if a trainer has the loop
    zerobench.main()                                           the command line

Names are imported when they are first used, so that a rank loads no more than it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ranks.collectives import load_calibration
    from .registry import register_data, register_model
    from .results.tables import Results, load
    from .strategies import register_strategy
    from .sweep.from_python import run
    from .watching import ExpectedTraining, lightning_callback, trainer_callback
    from .watching import Watch as watch
    from .zero import initialize

__version__ = "0.1.0"
__all__ = [
    "ExpectedTraining",
    "Results",
    "initialize",
    "lightning_callback",
    "load",
    "load_calibration",
    "main",
    "register_data",
    "register_model",
    "register_strategy",
    "run",
    "trainer_callback",
    "watch",
]

_HOMES = {
    "initialize": ".zero",
    "run": ".sweep.from_python",
    "load": ".results.tables",
    "Results": ".results.tables",
    "load_calibration": ".ranks.collectives",
    "register_data": ".registry",
    "register_model": ".registry",
    "register_strategy": ".strategies",
    "watch": ".watching",
    "ExpectedTraining": ".watching",
    "trainer_callback": ".watching",
    "lightning_callback": ".watching",
}

_PLOTTED = ("load", "Results", "run")
"""Names whose results get `Results.plot` from plots/."""

_NAMES = {"watch": "Watch"}
"""Name -> its different name in its own module."""


def main() -> None:
    """Runs the console script and exits; an interrupt during imports exits quietly with 130, as it does later."""
    try:
        import_module(".cli", __name__).main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zerobench' has no attribute {name!r}")
    if name in _PLOTTED:
        import_module(".plots", __name__)
    return getattr(import_module(_HOMES[name], __name__), _NAMES.get(name, name))
