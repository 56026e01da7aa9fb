"""What a watch does to make a certificate: it observes each rank, brings observations together, and judges them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import nn

from ..cluster.serialize import rebuild, to_plain
from ..probes import AccountedPass
from .certificate import Certificate, certificate_of
from .comparing import compare_with_reference, effect_of_option
from .expected import ExpectedTraining
from .job_seen import JobSeen
from .judging import judge
from .observed import RankSeen, TrainingObserver


class Verifying:
    """The certificate of one watch, in the making. `observer`: exists within `observing`."""

    def __init__(self, expected: ExpectedTraining) -> None:
        self.expected = expected
        self._reference = None if expected.reference is None else certificate_of(expected.reference)
        self._unlike = None if expected.unlike is None else certificate_of(expected.unlike)
        if self._reference is not None and not self._reference.values.values:
            raise ValueError(
                "watch: the reference has no values of its updates; watch a loop of one process, with verify=True"
            )
        self.observer: TrainingObserver | None = None
        self.seen = RankSeen()

    @classmethod
    def of(cls, given: bool | Certificate | str | Path | ExpectedTraining) -> Self | None:
        """Returns the object for watch's argument `verify`; None without a certificate.

        Raises FileNotFoundError for a folder without a certificate, ValueError if it is damaged or has no values.
        """
        if isinstance(given, bool):
            return cls(ExpectedTraining()) if given else None
        return cls(given if isinstance(given, ExpectedTraining) else ExpectedTraining(reference=given))

    @contextmanager
    def observing(self, model: nn.Module, engines: list[Any], accounted: AccountedPass, ranks: int) -> Iterator[None]:
        """Observes the steps in its block."""
        values = None if self._reference is None else self._reference.values
        keeps = ranks == 1 and self._reference is None
        self.observer = TrainingObserver(model, engines, accounted.ledger, accounted.meter, values, keeps)
        with self.observer.observing():
            yield
        if (step := accounted.ledger.sums.extremes.get("step")) is not None:
            self.observer.seen.peak_bytes = step.peak
        self.seen, self.values = self.observer.seen, self.observer.values
        self.observer = None  # a certificate keeps no model alive

    @property
    def record(self) -> dict[str, Any]:
        """This rank's observations, as plain values."""
        plain: dict[str, Any] = to_plain(self.seen)
        return plain

    def certify(self, records: list[dict[str, Any]], strategy: str, name: str) -> Certificate:
        """Returns the certificate of the job from the observations of all ranks."""
        job = JobSeen(strategy, [rebuild(RankSeen, one) for one in records], name)
        reference = self._reference.job if self._reference is not None else None
        rows = judge(job, self.expected, reference)
        if reference is not None:
            rows += compare_with_reference(job, reference)
        if self._unlike is not None:
            rows.append(effect_of_option(job, self._unlike.job))
        return Certificate(job, rows, self.values)
