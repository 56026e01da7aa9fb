"""Colors and hatches for figures and pages: distinguishable in print, in gray, and by the color-blind.

A *fill* is a color and a hatch in matplotlib's notation; pages draw the same hatches as SVG patterns. Colors of
strategies are in strategies/table.py.
"""

from __future__ import annotations

from collections.abc import Mapping

# Okabe and Ito's palette, distinguishable with all common kinds of color vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GRAY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"

Fills = Mapping[str, tuple[str, str]]
"""Name of a part of a bar -> its color and hatch."""

CATEGORIES: Fills = {
    "parameters": (BLUE, ""),
    "gradients": (ORANGE, "//"),
    "master": (SKY, "++"),
    "optimizer": (GREEN, "\\\\"),
    "communication": (VERMILION, "xx"),
    "activations": (PURPLE, ".."),
    "inputs": (YELLOW, ""),
    "temporary": (GRAY, "--"),
}
COLLECTIVES: Fills = {
    "all_reduce": (BLUE, ""),
    "reduce_scatter": (ORANGE, "//"),
    "all_gather": (GREEN, "\\\\"),
    "other": (GRAY, "--"),
}
OVERLAP: Fills = {
    "traced: no communication": (GRAY, ""),
    "traced: communication hidden": (GREEN, ".."),
    "traced: communication exposed": (VERMILION, "xx"),
}
PHASES: Fills = {"forward": (SKY, ""), "backward": (BLUE, "//"), "update": (ORANGE, "\\\\")}
