"""What a watch does to make a certificate: it observes each rank, brings observations together, and judges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import nn

from ..cluster.serialize import rebuild
from ..probes import AccountedPass
from ..records import CertificateRow
from .between_ranks import judge_ranks
from .certificate import FIRST, UNKNOWN, Certificate, certificate_of
from .comparing import compare_with_reference, effect_of_option
from .expected import ExpectedTraining
from .job_seen import JobSeen
from .judging import judge
from .observed import FirstUpdates, RankSeen, TrainingObserver


class Verifying:
    """The certificate of one watch, in the making."""

    def __init__(self, expected: ExpectedTraining) -> None:
        self.expected = expected
        self._reference = None if expected.reference is None else certificate_of(expected.reference)
        self._unlike = None if expected.unlike is None else certificate_of(expected.unlike)
        if self._reference is not None and not self._reference.values.values:
            raise ValueError(
                "watch: the reference has no values of its updates; watch a loop of one process, with verify=True"
            )

    @classmethod
    def of(cls, given: bool | Certificate | str | Path | ExpectedTraining) -> Self | None:
        """Returns the object for watch's argument `verify`; None without a certificate.

        Raises FileNotFoundError for a folder without a certificate, ValueError if it is damaged or has no values.
        """
        if isinstance(given, bool):
            return cls(ExpectedTraining()) if given else None
        return cls(given if isinstance(given, ExpectedTraining) else ExpectedTraining(reference=given))

    def observer(
        self, model: nn.Module, engines: list[Any], optimizers: list[Any], probe: AccountedPass, ranks: int
    ) -> TrainingObserver:
        """Returns the observer of one rank's steps."""
        values = None if self._reference is None else self._reference.values
        return TrainingObserver(model, engines, optimizers, probe.ledger, probe.meter, values, ranks)

    def certify(self, records: list[dict[str, Any]], values: FirstUpdates, strategy: str, name: str) -> Certificate:
        """Returns the certificate of the job from the observations of all ranks."""
        job = JobSeen(strategy, [rebuild(RankSeen, one) for one in records], name)
        if problem := next((rank.failure for rank in job.ranks if rank.failure), ""):
            row = CertificateRow("watch", "the loop", "not followed to its end", "", problem, UNKNOWN)
            return Certificate(job, [row])
        reference = self._reference.job if self._reference is not None else None
        rows = [*judge(job, self.expected, reference), *judge_ranks(job, self.expected)]
        if reference is not None:
            rows += compare_with_reference(job, reference)
        if self._unlike is not None:
            rows.append(effect_of_option(job, self._unlike.job))
        rows.sort(key=lambda row: FIRST.index(row.verdict) if row.verdict in FIRST else len(FIRST))
        return Certificate(job, rows, values)
