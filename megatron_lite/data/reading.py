"""Readers: from sample indices to an array of checked token ids.

Neither this module nor `workers.py` imports torch: loader workers run nothing else, so they start in a fraction of a
second and take a tenth of the memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.blending import Blend, Concatenation
from megatron_lite.data.disk_array import DiskArray
from megatron_lite.data.fill_in_the_middle import FillInTheMiddle
from megatron_lite.data.indexed_dataset import DocumentBorders, IndexedDataset
from megatron_lite.data.loss_masks import masked_labels
from megatron_lite.data.packing import PackedFile
from megatron_lite.data.sampling import StreamSampler, random_tokens
from megatron_lite.data.shuffled_documents import Run, ShuffledDocuments
from megatron_lite.errors import DataError


@dataclass(frozen=True)
class Samples:
    """k samples."""

    tokens: NDArray[Any]  # (k, s + 1) in an integer dtype
    warnings: tuple[str, ...] = ()  # about slow reads, and about files that changed their date
    # Lengths of the pieces of documents in the inputs (the first s tokens of each sample), sample by sample. A document
    # that began or ends in another sample has one piece in each. None if the run does not ask for them.
    lengths: NDArray[np.int32] | None = None
    masked: NDArray[np.bool_] | None = None  # (k, s) labels that count in no loss; None: all count


class Reader(Protocol):
    def read(self, first: int, count: int) -> Samples:
        """Read the samples first, first + 1, ..., first + count - 1."""


@dataclass(frozen=True)
class RandomReader:
    """Made-up tokens, each sample one document; see `random_tokens`."""

    key: int
    sequence_length: int
    vocab_size: int
    documents: bool = False  # whether to return `Samples.lengths`

    def read(self, first: int, count: int) -> Samples:
        indices = np.arange(first, first + count, dtype=np.int64)
        tokens = random_tokens(indices, self.sequence_length + 1, self.vocab_size, self.key)
        lengths = np.full(count, self.sequence_length, dtype=np.int32) if self.documents else None
        return Samples(tokens, lengths=lengths)


@dataclass(frozen=True)
class Stream:
    """The documents of one split of one data set, as one stream of tokens."""

    prefix: str
    file: DiskArray
    first_token: int  # of the split, in the file
    sampler: StreamSampler
    borders: DocumentBorders | None = None  # set to return `Samples.lengths`
    documents: ShuffledDocuments | None = None  # set to shuffle documents as `sampler.order` says
    mask: DiskArray | None = None  # see loss_masks.py; as long as `file`
    packed: PackedFile | None = None  # set to pack whole documents; a "token" of the sampler is then a sample

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return self.sampler.num_tokens if self.packed is None else self.packed.plan.num_tokens

    def read(self, epoch: int, start: int, tokens: NDArray[Any]) -> NDArray[np.int32] | None:
        """Fill a sample, (s + 1,), from a place in the stream of an epoch; what packed documents leave stays as it is.

        Returns: the lengths of its pieces of documents, if there are `borders`, or they are packed.
        """
        if (runs := self._runs(epoch, start, len(tokens))) is None:
            tokens[:] = self.file.read(self.first_token + start, len(tokens))
            if self.borders is None:
                return None
            return self.borders.pieces(self.first_token + start, len(tokens))
        filled = 0
        for first, length in runs:
            tokens[filled : filled + length] = self.file.read(first, length)
            filled += length
        known = self.borders is not None or self.packed is not None
        return np.array([length for _, length in runs], dtype=np.int32) if known else None

    def masked(self, epoch: int, start: int, width: int) -> NDArray[np.bool_]:
        """Return which tokens of a sample the mask leaves out of the loss, (width,), or fewer before padding."""
        assert self.mask is not None
        runs = self._runs(epoch, start, width) or [(self.first_token + start, width)]
        return np.concatenate([masked_labels(self.mask, first, length) for first, length in runs])

    def place(self, epoch: int, start: int, offset: int) -> int:
        """Return the place in the file of a token of a sample: `offset` tokens after `start`."""
        runs = self._runs(epoch, start, offset + 1)
        if runs is None:
            return self.first_token + start + offset
        places = itertools.chain(*(range(first, first + length) for first, length in runs))
        return next(itertools.islice(places, offset, None))

    def _runs(self, epoch: int, start: int, length: int) -> list[Run] | None:
        """Return where in the file the tokens are; None if documents are in file order."""
        if self.packed is not None:
            return self.packed.runs(epoch, start)
        if self.documents is None or (self.sampler.order.shuffle == "skip_first_epoch" and epoch == 0):
            return None
        return self.documents.runs(epoch, start, length)

    def check(self) -> list[str]:
        """Check that the files are those of the start, see `DataFile.check`; return its warnings."""
        arrays = [self.file]
        if self.borders is not None:
            arrays.append(self.borders.starts)
        for index in (self.documents, self.packed):
            if index is not None:
                arrays.append(index.sizes)
        if self.mask is not None:
            arrays.append(self.mask)
        files = dict.fromkeys(array.file for array in arrays)
        return [warning for file in files if (warning := file.check()) is not None]


class StreamReader:
    """Reads samples of a blend of streams and checks their token ids."""

    def __init__(
        self,
        streams: Sequence[Stream],
        blend: Blend | Concatenation,
        sequence_length: int,
        vocab_size: int,
        slow_ms: float,
        mask_starts: bool = False,
        fill: FillInTheMiddle | None = None,
    ) -> None:
        """slow_ms: reading time of one sample above which to warn. mask_starts: see --mask_document_starts."""
        assert len(streams) == blend.num_datasets, (len(streams), blend.num_datasets)
        self.streams = tuple(streams)
        self.blend = blend
        self.vocab_size = vocab_size
        self.slow_ms = slow_ms
        self.mask_starts = mask_starts
        self.fill = fill
        self.sequence_length = sequence_length
        self.packed = any(stream.packed is not None for stream in streams)
        masks = any(stream.mask is not None for stream in streams)
        self.has_masks = masks or mask_starts or self.packed or fill is not None
        self.dtype = np.dtype(np.int64) if fill else np.result_type(*(stream.file.dtype for stream in streams))

    def read(self, first: int, count: int) -> Samples:
        """Read `count` samples from the streams that the blend names.

        Raises: DataError if a file has changed, cannot be read any more or holds a token id outside the vocabulary.
        """
        datasets, epochs, starts = places = self._locate(np.arange(first, first + count, dtype=np.int64))
        tokens = np.zeros((count, self.sequence_length + 1), dtype=self.dtype)
        masked = np.zeros((count, self.sequence_length), dtype=np.bool_) if self.has_masks else None
        warnings, pieces, lengths = [], [], []
        for row, (dataset, epoch, start) in enumerate(zip(*(place.tolist() for place in places), strict=True)):
            begun = time.perf_counter()
            stream = self.streams[dataset]
            if stream.mask is not None and masked is not None:
                left_out = stream.masked(epoch, start, self.sequence_length + 1)
                masked[row, : len(left_out) - 1] = left_out[1:]  # a label is the token after an input
            pieces.append(stream.read(epoch, start, tokens[row]))
            taken_ms = (time.perf_counter() - begun) * 1000
            if taken_ms > self.slow_ms:
                warnings.append(
                    f"{stream.file.path}: reading one sample took {taken_ms:,.0f} ms (--data_sample_warn_time_ms)"
                )
        for dataset in set(datasets.tolist()):
            warnings += self.streams[dataset].check()
        if count and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size):
            raise self._bad_token(tokens, datasets, epochs, starts)
        for row, own in enumerate(pieces):
            if own is not None:
                lengths.append(self._finish(first + row, tokens[row], own, None if masked is None else masked[row]))
        return Samples(tokens, tuple(warnings), np.concatenate(lengths) if lengths else None, masked)

    def _finish(
        self, index: int, tokens: NDArray[Any], pieces: NDArray[np.int32], masked: NDArray[np.bool_] | None
    ) -> NDArray[np.int32]:
        """Rearrange the documents of a sample, (s + 1,), and mask its labels, (s,), as the options say, in place.

        pieces: lengths of the pieces of documents; padding follows them.

        Returns: the lengths of the pieces of the first s tokens.
        """
        filled = int(pieces.sum())
        if self.fill is not None and masked is not None:
            tokens[:filled], pieces, padding = self.fill.sample(tokens[:filled], pieces, index)
            masked[: filled - 1] = padding[1:]
        if filled < len(tokens):
            pieces = np.append(pieces, np.int32(len(tokens) - filled))
        if masked is not None:
            masked[filled - 1 :] = True  # the padding is no label
            if self.mask_starts:
                masked[np.cumsum(pieces[:-1]) - 1] = True
        return without_last_token(pieces)

    def _locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the data set of each sample, and the epoch and the position of its first token in that stream."""
        if len(self.streams) == 1:
            return np.zeros_like(indices), *self.streams[0].sampler.places(indices)
        datasets, own = self.blend.locate(indices)
        epochs, starts = np.empty_like(indices), np.empty_like(indices)
        for dataset in np.unique(datasets).tolist():
            rows = datasets == dataset
            epochs[rows], starts[rows] = self.streams[dataset].sampler.places(own[rows])
        return datasets, epochs, starts

    def _bad_token(
        self, tokens: NDArray[Any], datasets: NDArray[np.int64], epochs: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> DataError:
        """Make the error that names the first token id outside the vocabulary."""
        row, column = np.argwhere((tokens < 0) | (tokens.astype(np.int64) >= self.vocab_size))[0].tolist()
        stream = self.streams[int(datasets[row])]
        place = stream.place(int(epochs[row]), int(starts[row]), column)
        document, offset = IndexedDataset(stream.prefix).locate(place)
        return DataError(
            f"{stream.file.path}: document {document}, offset {offset}: token id {int(tokens[row, column])} is outside "
            f"the vocabulary of {self.vocab_size} (--vocab_size)"
        )


def without_last_token(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the lengths of pieces of s + 1 tokens for the first s of them."""
    shorter = lengths.copy()
    shorter[-1] -= 1
    return shorter if shorter[-1] else shorter[:-1]
