"""Mutants of the engine, the probes and the theory."""

from pathlib import Path

from ..mutant import Mutant, read_mutants

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant for path in sorted(Path(__file__).parent.glob("*.txt")) for mutant in read_mutants(path.read_text())
)
