"""Where documents begin and end within a sample, for attention that does not cross their borders.

A sample is any run of tokens of the stream, so its first document may have begun, and its last may end, in another
sample; what lies in this one is a *piece*. Like `reading.py`, this module imports no torch.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed_dataset import DiskArray

_CHUNK = 512  # entries of the index read at a time: one page of 4 KiB


@dataclass(frozen=True)
class DocumentBorders:
    """The documents of one data set, looked up in its index on disk: a few dozen reads of a cached file a sample.

    Loading the index, or mapping it, would cost each worker 8 bytes per document, or a SIGBUS where it is cut short.
    """

    starts: DiskArray  # (n,) first byte of each document in `.bin`, rising; an empty document's is the next one's
    dtype: np.dtype[Any]  # of the tokens in `.bin`

    def pieces(self, start: int, length: int) -> NDArray[np.int32]:
        """Lengths of the pieces of documents that tokens [start, start + length) of the file consist of, in order.

        None is zero, and they add up to `length`. Empty documents have no piece.

        Raises: DataError if the index cannot be read any more.
        """
        itemsize = self.dtype.itemsize
        end = start + length
        borders: list[Any] = [[start]]
        document = bisect.bisect_right(self.starts, start * itemsize)  # the first that begins after `start`
        while document < len(self.starts):
            begins = self.starts.read(document, min(_CHUNK, len(self.starts) - document)) // itemsize
            borders.append(begins[begins < end])
            if begins[-1] >= end:
                break
            document += len(begins)
        return np.diff(np.unique(np.concatenate([*borders, [end]]))).astype(np.int32)
