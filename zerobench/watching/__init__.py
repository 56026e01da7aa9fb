"""Watches a training loop of any kind: the same tables as a run's, for code that zerobench does not start.

Users' scripts, budgets and commands import it.

    with zerobench.watch(model, optimizer, to="watched") as watch:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    watch.results.runs.peak_bytes

watch.py is the object and its states, with callbacks for trainers; phases.py finds the phases of a step,
held_tensors.py labels tensors that the loop already has, rows.py collects the ranks' records and makes the tables.

With `verify=` a watch also makes a certificate of the training: observed.py observes a rank; judging.py and
comparing.py judge; certificate.py joins the ranks, and has the expected training and the result.
"""

from .certificate import Certificate, CertificateError, ExpectedTraining
from .rows import WatchError
from .watch import Watch, lightning_callback, trainer_callback

__all__ = [
    "Certificate",
    "CertificateError",
    "ExpectedTraining",
    "Watch",
    "WatchError",
    "lightning_callback",
    "trainer_callback",
]
