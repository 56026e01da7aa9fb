"""Profiles of hypothesis: a slice of the fuzz in every run of the tests, and the campaign of `make fuzz`.

hypothesis makes a finding small, prints it, and keeps it in .hypothesis/, so that the next run begins with it.
"""

import gc
import resource
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from zerobench.host.environment import data_bytes

SLICE, CAMPAIGN = 2, 100
"""Damages for each reader of files."""

MEMORY_BYTES = 4 * 2**30
"""Memory that a test may take on top of what its process has."""

usual = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
at_once = (Phase.explicit, Phase.generate)  # a finding is made small by the campaign: that takes minutes
settings.register_profile("slice", usual, max_examples=SLICE, derandomize=True, database=None, phases=at_once)
settings.register_profile("campaign", usual, max_examples=CAMPAIGN)
settings.load_profile("slice")


def examples() -> int:
    """Returns the damages of each reader in the profile that is loaded."""
    return CAMPAIGN if settings.get_current_profile_name() == "campaign" else SLICE


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Ends a case that takes gigabytes with a MemoryError."""
    before, often = resource.getrlimit(resource.RLIMIT_DATA), gc.get_threshold()
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + MEMORY_BYTES, before[1]))
    gc.set_threshold(50_000)  # composing leaves much behind, a hundred times in a second
    yield
    gc.set_threshold(*often)
    resource.setrlimit(resource.RLIMIT_DATA, before)
