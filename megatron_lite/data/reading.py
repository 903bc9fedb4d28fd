"""Read samples, as arrays of checked token ids, by index.

Neither this module nor `workers.py` imports torch: loader workers run nothing else, so they start
in a fraction of a second and take a tenth of the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.blending import Blend, Concatenation, Integers
from megatron_lite.data.disk_array import DiskArray
from megatron_lite.data.indexed_dataset import IndexedDataset, Run
from megatron_lite.data.sampling import DocumentOrder, PackedDocuments, StreamSampler, random_tokens
from megatron_lite.data.skipped import Skipped
from megatron_lite.errors import DataError

if TYPE_CHECKING:
    from megatron_lite.data.fill_in_the_middle import FillInTheMiddle

SEARCHED_TOKENS = 1 << 20  # at a time
SLOW_MS = 1000.0  # warn about longer waits for a sample or a batch


class Samples(NamedTuple):
    """k samples."""

    tokens: NDArray[Any]  # (k, s + 1) in an integer dtype
    warnings: tuple[str, ...] = ()  # about slow reads, and about files with a changed date
    # Lengths of the pieces of documents in the inputs (the first s tokens of each sample), sample
    # by sample. A document that began or ends in another sample has one piece in each. None if the
    # reader does not record them.
    lengths: NDArray[np.int32] | None = None
    masked: NDArray[np.bool_] | None = None  # (k, s) labels without a loss; None: all have one


class RandomReader(NamedTuple):
    """Random tokens, each sample one document; see `random_tokens`."""

    key: int
    sequence_length: int
    vocab_size: int

    def read(self, first: int, count: int) -> Samples:
        """Generate samples first, first + 1, ..., first + count - 1."""
        indices = np.arange(first, first + count)
        tokens = random_tokens(indices, self.sequence_length + 1, self.vocab_size, self.key)
        return Samples(tokens, lengths=np.full(count, self.sequence_length, dtype=np.int32))


@dataclass(eq=False)
class Stream:
    """One split's documents in one data set, as one stream of tokens."""

    dataset: IndexedDataset
    order: DocumentOrder
    sampler: StreamSampler  # with packed documents, a "token" of the sampler is a sample
    mask: DiskArray | None = None  # one entry per token of the data set, see `masked_labels`

    def check(self) -> list[str]:
        """Check that the files have not changed since the start, see `DataFile.check`; return its
        warnings."""
        arrays = [self.dataset.tokens]
        if self.order.by_document:
            arrays.append(self.dataset.pointers)
        if self.mask is not None:
            arrays.append(self.mask)
        return [warning for array in arrays if (warning := array.file.check()) is not None]


@dataclass(eq=False)
class StreamReader:
    """Reads samples from a blend of streams and checks their token ids."""

    streams: Sequence[Stream]
    blend: Blend | Concatenation
    sequence_length: int
    vocab_size: int
    slow_ms: float  # reading time of one sample above which to warn
    mask_starts: bool = False  # see --mask_document_starts
    fill: FillInTheMiddle | None = None
    skipped: Skipped = Skipped()

    def __post_init__(self) -> None:
        streams = self.streams
        assert len(streams) == self.blend.num_datasets, (len(streams), self.blend.num_datasets)
        self.packed = any(isinstance(stream.order, PackedDocuments) for stream in streams)
        masks = any(stream.mask is not None for stream in streams)
        self.has_masks = masks or self.mask_starts or self.packed or self.fill is not None
        dtypes = (stream.dataset.tokens.dtype for stream in streams)
        self.dtype = np.dtype(np.int64) if self.fill else np.result_type(*dtypes)

    def read(self, first: int, count: int) -> Samples:
        """Read samples first, first + 1, ..., first + count - 1, counted without skipped ones, from
        the blend's streams.

        Raises: DataError if a file has changed, cannot be read any more or contains a token id
        outside the vocabulary.
        """
        indices = self.skipped.positions(np.arange(first, first + count))
        places = self._locate(indices)
        tokens = np.zeros((count, self.sequence_length + 1), dtype=self.dtype)
        masked = np.zeros((count, self.sequence_length), dtype=np.bool_)
        warnings, pieces = [], dict[int, NDArray[np.int32]]()
        for row, (dataset, epoch, start) in enumerate(
            zip(*(place.tolist() for place in places), strict=True)
        ):
            begun, filled = time.perf_counter(), 0
            stream = self.streams[dataset]
            runs = stream.order.runs(epoch, start, self.sequence_length + 1)
            reads = reads_of(runs)
            if stream.mask is not None:
                left_out = np.concatenate([masked_labels(stream.mask, *run) for run in reads])
                # a label is the token after an input
                masked[row, : len(left_out) - 1] = left_out[1:]
            for place, length in reads:
                tokens[row, filled : filled + length] = stream.dataset.tokens.read(place, length)
                filled += length
            if stream.order.by_document:
                pieces[row] = np.array([length for _, length in runs], dtype=np.int32)
            taken_ms = (time.perf_counter() - begun) * 1000
            if taken_ms > self.slow_ms:
                path = stream.dataset.tokens.path
                warnings.append(f"{path}: reading one sample took {taken_ms:,.0f} ms")
        for dataset in set(places[0].tolist()):
            warnings += self.streams[dataset].check()
        if count and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size):
            raise self._bad_token(tokens, *places)
        lengths = [
            self._finish(int(indices[row]), tokens[row], own, masked[row])
            for row, own in pieces.items()
        ]
        joined = np.concatenate(lengths) if lengths else None
        return Samples(tokens, tuple(warnings), joined, masked if self.has_masks else None)

    def _finish(
        self, index: int, tokens: NDArray[Any], pieces: NDArray[np.int32], masked: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Rearrange a sample's documents, (s + 1,), and mask its labels, (s,), as configured, in
        place.

        pieces: lengths of the pieces of documents; padding follows them.

        Returns: the lengths of the pieces in the first s tokens.
        """
        filled = int(pieces.sum())
        if self.fill is not None:
            tokens[:filled], pieces, padding = self.fill.sample(tokens[:filled], pieces, index)
            masked[: filled - 1] = padding[1:]
        if filled < len(tokens):
            pieces = np.append(pieces, np.int32(len(tokens) - filled))
        masked[filled - 1 :] = True  # padding is not a label
        if self.mask_starts:
            masked[np.cumsum(pieces[:-1]) - 1] = True
        inputs = pieces.copy()
        inputs[-1] -= 1  # the last token is only a label
        return inputs[inputs > 0]

    def _locate(self, indices: Integers) -> tuple[Integers, Integers, Integers]:
        """Return each sample's data set, epoch, and its first token's position in that stream."""
        if len(self.streams) == 1:
            return np.zeros_like(indices), *self.streams[0].sampler.places(indices)
        datasets, own = self.blend.locate(indices)
        epochs, starts = np.empty_like(indices), np.empty_like(indices)
        for dataset in np.unique(datasets).tolist():
            rows = datasets == dataset
            epochs[rows], starts[rows] = self.streams[dataset].sampler.places(own[rows])
        return datasets, epochs, starts

    def _bad_token(
        self, tokens: NDArray[Any], datasets: Integers, epochs: Integers, starts: Integers
    ) -> DataError:
        """Return the error that names the first token id outside the vocabulary."""
        row, column = np.argwhere((tokens < 0) | (tokens.astype(np.int64) >= self.vocab_size))[
            0
        ].tolist()
        stream = self.streams[int(datasets[row])]
        runs = stream.order.runs(int(epochs[row]), int(starts[row]), column + 1)
        places = [place for first, length in runs for place in range(first, first + length)]
        return outside(stream.dataset, places[column], int(tokens[row, column]), self.vocab_size)


def outside(dataset: IndexedDataset, place: int, token: int, vocab_size: int) -> DataError:
    """Return the error for a token id outside the vocabulary at this place in `.bin`."""
    document, offset = dataset.locate(place)
    return DataError(
        f"{dataset.tokens.path}: document {document}, offset {offset}: token id {token} "
        f"is outside the vocabulary of {vocab_size} (--vocab_size)"
    )


def search(
    prefixes: Sequence[str], vocab_size: int, report: Callable[[DataError], None], ended: Event
) -> None:
    """Report the first token id outside the vocabulary in some pairs, using a tenth of one core,
    until `ended`."""
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)  # with its own files: this runs in a thread
        for start in range(0, dataset.num_tokens, SEARCHED_TOKENS):
            begun = time.perf_counter()
            tokens = dataset.tokens.read(start, min(SEARCHED_TOKENS, dataset.num_tokens - start))
            if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
                place = int(np.argmax((tokens < 0) | (tokens.astype(np.int64) >= vocab_size)))
                return report(outside(dataset, start + place, int(tokens[place]), vocab_size))
            if ended.wait(9 * (time.perf_counter() - begun)):
                return None


def reads_of(runs: Sequence[Run]) -> list[Run]:
    """Return each read's first token and length: one read for documents contiguous in the file."""
    found = list[Run]()
    for place, length in runs:
        if found and sum(found[-1]) == place:
            place, length = found[-1][0], found.pop()[1] + length
        found.append((place, length))
    return found


def masked_labels(mask: DiskArray, start: int, count: int) -> NDArray[np.bool_]:
    """Return whether each of tokens [start, start + count) is excluded from the loss, (count,).

    mask: 1 for each token of the data set with a loss, else 0; see --loss_mask.

    Raises: DataError if the mask cannot be read any more, or has another entry.
    """
    entries = mask.read(start, count)
    if wrong := np.flatnonzero((entries != 0) & (entries != 1))[:1].tolist():
        raise DataError(
            f"{mask.path} (--loss_mask): entry {start + wrong[0]:,} is {entries[wrong[0]]}; 1 lets a token count in "
            "the loss, 0 leaves it out"
        )
    counts: NDArray[np.bool_] = entries == 0
    return counts


Reader = RandomReader | StreamReader
