"""Questions about shapes alone: DTensor asks each operator's shape function once, with tensors of the global shape.

In a run these are fake tensors in a mode of torch's own, and take no memory. Inside of a fake world they are in the
world's mode, like the tensors of the rank, which a ledger could not tell apart: it counts none while one is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

_asked = [False]


def asked() -> bool:
    """Returns True while a question is answered: tensors that are made then belong to no rank."""
    return _asked[0]


@contextmanager
def apart() -> Iterator[None]:
    """Notes when DTensor asks. Its method is private to torch; a test fails where it moves.

    Imported here: it takes most of a second, which a command that fakes nothing would spend, too.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    answer = ShardingPropagator._propagate_tensor_meta_non_cached

    def noted(propagator: ShardingPropagator, schema: Any) -> Any:
        _asked[0] = True
        try:
            return answer(propagator, schema)
        finally:
            _asked[0] = False

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", noted):
        yield
