"""Committed tables, each folder read once: blocks of many pages are made of the same runs."""

from __future__ import annotations

from functools import cache

from zerobench.results import tables

load = cache(tables.load)
"""The tables of a folder, not to be changed."""
