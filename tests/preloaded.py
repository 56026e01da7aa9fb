"""Modules that ranks of tests find loaded beside those of the product's fork server, which saves each half a second."""

from __future__ import annotations

import gc

import hydra
import pandas
import pytest

import zerobench.sweep.cell

__all__ = ["hydra", "pandas", "pytest", "zerobench"]

gc.collect()
gc.freeze()  # a collection in a rank would walk over all of it, and copy its pages
