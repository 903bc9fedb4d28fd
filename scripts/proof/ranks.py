"""Processes that live on, train one short run after the other as the program does, and tell every
number of it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.config import Config, changed
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter
from megatron_lite.data.workers import end_with_parent
from megatron_lite.distributed.startup import join
from megatron_lite.errors import PeerError, UsageError
from megatron_lite.model import adapters
from megatron_lite.optimizer.balance import Balance
from megatron_lite.outputs.evaluation import evaluate
from megatron_lite.outputs.run import Run
from megatron_lite.outputs.saving import finish_save, save
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.setup_run import build
from megatron_lite.tiles import Tile
from megatron_lite.train import train_step
from megatron_lite.zero.multi_stage import MultiStage
from scripts.proof.eight_bits import Recorder, Scales, Use

# files in the working directory of all ranks
TOKENS = "tokens"
MASK = "mask"
RUN = "run"
RECORD = "record"  # begins folders of --moe_replay_routing, one for each part of a run
COUNTED = "counted"  # begins the names of numbers that no rounding changes
Prepare = Callable[[], None]
# kind, parameter, elements of the whole, place of these, numpy array
Piece = tuple[str, str, int, Tile, Any]


# --moe_replay_routing's files: name -> chosen experts + 1 of all tokens in order, 0: none
Routing = Mapping[str, NDArray[np.uint16]]


class Told(NamedTuple):
    """One rank's part of a Step."""

    iteration: int
    numbers: dict[str, float]
    pieces: list[Piece]
    uses: list[Use]  # of rounded factors, in the iteration
    evaluated: list[Use]  # and in the evaluation after it


class Part(NamedTuple):
    """The iterations of a run up to `last` that are not in its checkpoint."""

    config: Config  # resolved
    ranks: int
    last: int
    disturbance: float = 0.0  # of rounded factors, see `Recorder`, or of the initial weights


class Step(NamedTuple):
    """Numbers of an iteration, or of a start: gradients before the update, weights and averages
    after it."""

    iteration: int
    # loss, norm of the gradient, what is counted, and losses of an evaluation after it
    numbers: dict[str, float]
    tensors: dict[tuple[str, str], Tensor]  # (kind, name) -> whole parameter, flat, fp32
    chosen: Routing = MappingProxyType({})  # of the whole run, with its start

    def before(self, kind: str, name: str) -> Tensor:
        """Return what an update changes: of an average that begins when a layer is thawed, the
        weights."""
        return self.tensors.get((kind, name), self.tensors["weights", name])


class BrokenRunError(Exception):
    """A run that failed, or whose ranks do not agree."""


class Ranks:
    """Processes, each started once; use them in a `with` block. prepare: called in each at its
    start, for tests."""

    def __init__(self, device: str = "cpu", prepare: Prepare | None = None) -> None:
        self._folder, self._runs = tempfile.mkdtemp(prefix="prove_layouts_"), 0
        _write_data(self._folder)
        # Imports may look for GPUs, and then a fork cannot use them.
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        context.set_forkserver_preload(
            ["scripts.proof.ranks", "torch.fx.experimental.symbolic_shapes"]
        )
        begin = functools.partial(_begin, self._folder, prepare)
        self._new = functools.partial(ProcessPoolExecutor, 1, context, begin)
        self._processes: list[ProcessPoolExecutor] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.shutdown()
        shutil.rmtree(self._folder)

    def train(self, parts: Sequence[Part], chosen: Routing | None = None) -> list[Step]:
        """Train a run in parts; return the numbers of its start and of each iteration. chosen: the
        experts to take; None: those of the run's routers.

        Raises:
            UsageError: if the program refuses the options.
            BrokenRunError: if a rank fails, if two have different copies of what they hold alike,
                or if a part does not start with what the part before has saved.
        """
        shutil.rmtree(f"{self._folder}/{RUN}", ignore_errors=True)
        steps: list[Step] = []
        scales = Scales()
        records = [Path(self._folder, f"{RECORD}_{number}") for number in range(len(parts))]
        for record, part in zip(records, parts, strict=True):
            shutil.rmtree(record, ignore_errors=True)
            record.mkdir()
            for name, values in (chosen or {}).items():
                values.tofile(record / name)
            if part.config.model.num_experts > 1:
                config = changed(part.config, {"moe_replay_routing": record.name})
                part = part._replace(config=config)
            start, *others = self._train(part, scales)
            for key in start.tensors if steps else ():
                if not start.tensors[key].equal(steps[-1].before(*key)):
                    raise BrokenRunError(
                        f"the {key[0]} of {key[1]} are not those that were saved at step {start.iteration}"
                    )
            steps += others if steps else [start, *others]
        steps[0] = steps[0]._replace(chosen=_joined(records))
        return steps

    def _train(self, part: Part, scales: Scales) -> list[Step]:
        self._runs += 1
        self._processes += [self._new() for _ in range(len(self._processes), part.ranks)]
        store = f"{self._folder}/{self._runs}"
        futures = [
            self._processes[rank].submit(_train, part, rank, store) for rank in range(part.ranks)
        ]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        # which follows from another
        for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
            if isinstance(error, BrokenProcessPool):
                self._processes = []  # a dead one serves no further run
            if isinstance(error, UsageError):
                raise error
            raise BrokenRunError(
                "".join([f"{error}\n", *traceback.format_exception(error)])
            ) from None
        told = [*zip(*(future.result() for future in futures), strict=True)]
        if part.config.performance.eight_bit and not part.disturbance:
            _check_scales(scales, part.config, told)
        return [_together(of_ranks) for of_ranks in told]


def _joined(records: Sequence[Path]) -> Routing:
    """Return what the parts of a run have recorded, each of samples of its own."""
    found: dict[str, NDArray[np.uint16]] = {}
    for path in (path for record in records for path in sorted(record.iterdir())):
        values = np.fromfile(path, np.uint16)
        before = found.get(path.name, values[:0])
        before = np.pad(before, (0, max(0, len(values) - len(before))))
        found[path.name] = np.where(values, values, before)
    return found


def _check_scales(scales: Scales, config: Config, told: Sequence[Sequence[Told]]) -> None:
    for ranks in told:
        fault = scales.fault(config, [each.uses for each in ranks], ends_iteration=True)
        fault = fault or scales.fault(
            config, [each.evaluated for each in ranks], ends_iteration=False
        )
        if fault:
            raise BrokenRunError(f"at step {ranks[0].iteration}, {fault}")


def _together(ranks: Sequence[Told]) -> Step:
    """Put the pieces of all ranks together; several ranks must hold the same copies."""
    number, numbers = ranks[0].iteration, ranks[0].numbers
    tensors: dict[tuple[str, str], Tensor] = {}
    for kind, name, numel, tile, values in (piece for told in ranks for piece in told.pieces):
        whole = tensors.setdefault((kind, name), torch.full((numel,), torch.nan))
        place, piece = tile.view(whole), torch.from_numpy(values).view(tile.rows, tile.width)
        if not bool(((place == piece) | place.isnan()).all()):
            raise BrokenRunError(f"ranks hold different {kind} of {name} at step {number}")
        place.copy_(piece)
    if any(repr(other.numbers) != repr(numbers) for other in ranks):
        raise BrokenRunError(f"ranks have different losses or gradient norms at step {number}")
    return Step(number, numbers, tensors)


def _begin(folder: str, prepare: Prepare | None) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.chdir(folder)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _draw_on_the_cpu()
    _draw_adapters()
    if prepare is not None:
        prepare()
    _recorder()


@functools.cache
def _recorder() -> Recorder:
    return Recorder()  # one a process, after all mistakes are planted


def _draw_on_the_cpu() -> None:
    """Draw the initial weights of a GPU with the generator of a CPU, whose numbers are others."""
    fill = Initializer.fill

    def fill_from_cpu(self: Initializer, tensor: Tensor, generator: torch.Generator) -> None:
        values = torch.empty(tensor.shape)
        fill(self, values, torch.Generator().manual_seed(generator.initial_seed()))
        tensor.copy_(values)

    Initializer.fill = fill_from_cpu  # type: ignore[method-assign]


def _draw_adapters() -> None:
    """Begin B of adapters with random numbers too: from zeros, AdamW's first update is the learning
    rate times signs, some of which rounding decides."""
    declare = adapters.declare

    def declare_drawn(spec: ParameterSpec) -> Parameter:
        if spec.name.endswith(adapters.B):
            spec = replace(spec, initializer=Initializer("around_zero", 0.1))
        return declare(spec)

    adapters.declare = declare_drawn


@functools.cache
def _stop() -> StopSignal:
    return StopSignal()  # one a process, as each starts a thread


def _train(part: Part, rank: int, store: str) -> list[Told]:
    """Return this rank's numbers before the first iteration and of each."""
    _recorder().disturbance = part.disturbance
    try:
        meet = (lambda: dist.FileStore(store, part.ranks)) if part.ranks > 1 else None
        distributed = join(part.config.distributed, rank, part.ranks, rank, meet=meet)
        experiment = Experiment(part.config, rank)
        experiment.share(distributed)
        run = build(part.config, distributed, experiment, _stop(), ())
        if part.disturbance and not part.config.performance.eight_bit and run.iteration == 0:
            _disturb(run.model, part.disturbance)
        told = list(_iterations(run, part.last))
        save(run)
        finish_save(run)
        run.data.close()
        run.model.finish()
        distributed.barrier()
        experiment.release()
        distributed.close()
        return told
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _disturb(model: MultiStage, share: float) -> None:
    """Change weights by up to this share of each, by other numbers in each run."""
    for _, part in model.parts():
        weights = part.read("weights")
        weights *= 1.0 + share * torch.empty_like(weights).uniform_(-1, 1, generator=_dice())
        part.write("weights", weights)
    model.invalidate()


@functools.cache
def _dice() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _iterations(run: Run, last: int) -> Iterator[Told]:
    kinds = ("weights", "average") if run.config.averaging.enabled else ("weights",)
    yield Told(run.iteration, {}, [piece for kind in kinds for piece in _pieces(run, kind)], [], [])
    step, gradients = run.optimizer.step, list[Piece]()

    def with_gradients(*arguments: Any) -> Any:
        gradients[:] = _pieces(run, "gradients")
        return step(*arguments)

    vars(run.optimizer)["step"] = with_gradients
    for batches in run.data.batches("training", run.iteration, last - run.iteration):
        done = train_step(run, batches, run.iteration + 1)
        run.iteration += 1
        run.window.add(done.loss, done.tokens, done.verdict.skipped, 0.0)
        numbers = {"loss": float(done.loss) / max(done.tokens, 1), "norm": float(done.grad_norm)}
        batches_so_far = run.data.counts.schedule
        numbers |= {
            f"{COUNTED} samples": batches_so_far.consumed_samples(run.iteration),
            f"{COUNTED} tokens": batches_so_far.consumed_tokens(run.iteration),
            f"{COUNTED} samples of data sets": sum(
                row[-1] for row in run.data.counts.read(run.iteration)
            ),
        }
        if isinstance(balance := run.optimizer._followers.get("balance"), Balance):
            totals = balance._totals[:, : run.config.model.num_experts].flatten().tolist()
            numbers |= {
                f"{COUNTED} tokens of expert {number}": total for number, total in enumerate(totals)
            }
        pieces = [*gradients, *(piece for kind in kinds for piece in _pieces(run, kind))]
        uses = _recorder().taken()
        training = run.config.training
        if training.validation_iters and run.iteration % training.validation_interval == 0:
            found = evaluate(run, "validation")
            numbers |= {
                f"{name} of the validation": float(found[name] or 0.0)
                for name in ("loss", "averaged_loss")
                if name in found
            }
        yield Told(run.iteration, numbers, pieces, uses, _recorder().taken())


def _pieces(run: Run, kind: str) -> Iterator[Piece]:
    """Yield this rank's shards of weights, averages, or gradients without their scale, tile by
    tile."""
    for _, part in run.model.parts():
        if kind == "gradients" and part.has_state:
            shard = part.grad_shard.float() / run.optimizer.loss_scale.scale
        elif kind == "weights" or (kind == "average" and part.average is not None):
            shard = part.read(kind).float()
        else:
            continue
        for spec, tile in part.layout.tiles(part.rank):
            yield (
                kind,
                spec.name,
                spec.numel,
                tile,
                shard[tile.offset : tile.end].cpu().numpy().copy(),
            )


def _write_data(folder: str) -> None:
    """Write documents of random tokens, and a mask that leaves two fifths of them out of the
    loss."""
    dice = np.random.default_rng(0)
    tokens, mask = (IndexedDatasetWriter(f"{folder}/{name}", "<u2") for name in (TOKENS, MASK))
    with tokens, mask:
        for size in dice.integers(2, 40, 400):
            tokens.add_document(dice.integers(0, 61, size))
            mask.add_document(dice.integers(0, 5, size) > 1)
