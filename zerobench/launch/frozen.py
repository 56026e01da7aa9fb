"""Last module that the fork server loads: hides all objects created before from each rank's garbage collector.

Otherwise a collection would visit 300,000 torch objects, and copy their pages, in every rank of every pass.
"""

import gc

gc.collect()
gc.freeze()
