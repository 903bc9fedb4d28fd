"""What the server of ranks and programs does last before it forks any, so that none of them has
to."""

import gc

from megatron_lite.config.other_programs import table

table()
# No fork searches for garbage in what all share, nor copies its pages to mark them.
gc.freeze()
