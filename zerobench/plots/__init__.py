"""Figures of finished runs, for `zerobench plot` and, as matplotlib axes, for `results.plot`.

Commands and notebooks import it, when a figure is drawn.

page.py determines the size of a figure and its text, panels.py which cells are shown side by side, marks.py how they
are drawn. A figure is a function of its name in the module that MODULES names, `memory(results, panels, ...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..results.tables import Results
from ..sizes import parse_memory

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

    from .page import Sheet

    Drawn = Axes | np.ndarray[Any, np.dtype[np.object_]]
    """One Axes, or an array of Axes for several panels, as `plt.subplots` returns them."""


MODULES = {
    "memory": "bars", "volume": "bars", "step_time": "bars", "timeline": "steps", "losses": "steps",
    "scaling": "scaling", "throughput": "scaling", "pareto": "pareto",
}  # fmt: skip


def figure_function(name: str) -> Callable[..., Sheet]:
    """Returns the function that draws a figure of MODULES."""
    draw: Callable[..., Sheet] = getattr(import_module(f".{MODULES[name]}", __package__), name)
    return draw


@dataclass(frozen=True)
class Plots:
    """Figures of some runs, a method each.

    A method draws a panel for each set of cells that train the same thing, as `zerobench plot` does, and leaves out
    what that leaves out: failed attempts, and runs that a newer one of the same cell supersedes. It returns one
    matplotlib Axes, or an array of Axes for several panels. `axes.figure` is the figure, which is pyplot's: a
    notebook shows it, and so does `plt.show()`; further figures are `panels=`, the most that are drawn.

    `results.plot(width="column", style="slides")` returns the same for another page.
    """

    results: Results
    width: str = "page"
    style: str = "paper"

    def __call__(self, width: str = "page", style: str = "paper") -> Plots:
        """Returns the figures for another page. `width`: page or column; `style`: paper or slides.

        Raises ValueError for another word.
        """
        from .page import POINTS, WIDTHS

        for name, value, choices in (("width", width, WIDTHS), ("style", style, POINTS)):
            if value not in choices:
                raise ValueError(f"plot: {name}={value!r} is none of {', '.join(choices)}")
        return replace(self, width=width, style=style)

    def memory(self, capacity: int | str | None = None, **options: Any) -> Drawn:
        """Model states and the peak by category, in bytes, with the prediction.

        `capacity`: memory of a rank, in bytes or as in "24 GiB", drawn as a line.
        """
        size = None if capacity is None else parse_memory(capacity, "capacity: ")
        return self._drawn("memory", capacity=size, **options)

    def volume(self, **options: Any) -> Drawn:
        """Elements moved per step over ψ, by collective, with the prediction."""
        return self._drawn("volume", **options)

    def step_time(self, **options: Any) -> Drawn:
        """Milliseconds of a step on the slowest rank, by phase, with 95 % intervals if available."""
        return self._drawn("step_time", **options)

    def timeline(self, **options: Any) -> Drawn:
        """Live bytes by category within one step of the accounted pass; a panel for each cell."""
        return self._drawn("timeline", **options)

    def losses(self, **options: Any) -> Drawn:
        """Losses of every step, and their differences from DDP's; two axes for each panel."""
        return self._drawn("losses", **options)

    def scaling(self, **options: Any) -> Drawn:
        """States and peak against N, measured and predicted; two axes for each panel."""
        return self._drawn("scaling", **options)

    def throughput(self, **options: Any) -> Drawn:
        """Tokens/s against N, what of it is lost, and the peak that pays for it; three axes for each panel.

        `drop_from`: ddp, DDP at the same N (the default); or linear, N times what the strategy reaches at N = 1.
        """
        return self._drawn("throughput", **options)

    def pareto(self, **options: Any) -> Drawn:
        """Tokens/s against peak memory, with the front of cells that no other beats in both.

        A panel with a cell that ran on a busy machine has no front.
        """
        return self._drawn("pareto", **options)

    def _drawn(self, name: str, **options: Any) -> Drawn:
        """Draws one figure and returns its axes. Raises ValueError if no run can be drawn."""
        import numpy as np
        from matplotlib import pyplot as plt

        from .page import Page, settle

        if options.get("panels", 1) < 1:
            raise ValueError(f"plot.{name}: panels={options['panels']}: must be at least 1")
        runs = self.results.runs
        if runs.empty:
            raise ValueError(f"plot.{name}: there are no runs in these results")
        results, _ = self.results.chosen((), everything=False)
        if results.runs.empty:
            last = runs.iloc[-1]
            raise ValueError(f"plot.{name}: no run has a result; the last is {last['status']}: {last['reason']}")
        with Page(width=self.width, style=self.style).used():
            figure = figure_function(name)(results, **options)
            settle(figure)
        plt.figure(FigureClass=lambda **page: figure)  # registered with pyplot, so that notebooks show it
        axes = np.array(figure.axes, dtype=object)
        return axes[0] if len(axes) == 1 else axes


Results.plot = property(Plots)
