"""The modules that the fork server loads for all ranks, hidden from each rank's garbage collector.

Otherwise a collection would visit 300,000 torch objects, and copy their pages, in every rank of every pass. Garbage
collection is off while the modules load, since their objects stay. torch's compiler is not loaded (fake/compiler.py).
"""

import gc

gc.disable()

import torch.distributed.fsdp  # noqa: E402
import torch.nn.parallel  # noqa: E402, F401

from .. import worker  # noqa: E402, F401
from ..fake.compiler import stand_in  # noqa: E402

stand_in()
gc.freeze()
gc.enable()
