"""The end of a dry run: layouts that fit and their predicted speed, and a command that runs the best of them."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_lite.checkpoint.space import files_bytes
from megatron_lite.config import Config, DistributedConfig, flatten, unflatten
from megatron_lite.data.open_data import open_data
from megatron_lite.errors import RunError, UsageError
from megatron_lite.planner.advice import (
    Changes,
    Fit,
    Question,
    SearchTooLongError,
    advice,
    cheapest_fit,
    fewest_sharing_ranks,
    least_bytes,
    with_more_sharing,
)
from megatron_lite.planner.command import PROGRAM, changed_words, hours, launcher, layout_of_nodes, quoted
from megatron_lite.planner.devices import GPUS_PER_NODE, cpu_sheet, gpu_sheet
from megatron_lite.planner.job import write_job
from megatron_lite.planner.plan import Plan
from megatron_lite.planner.runtime import GIB
from megatron_lite.planner.search import SEARCHED, SHARING, Layout, Search, fewest_changes, recommended
from megatron_lite.planner.speeds import MeasuredSpeeds, Speeds, read_speeds
from megatron_lite.run.threads import choose_threads
from megatron_lite.schedules.batch_options import consumed_tokens
from megatron_lite.validation.messages import Note

WIDTH = 118
ROWS = 10  # layouts that are shown
COLUMNS = (
    ("ZeRO", 4),
    ("micro-batches", 16),
    ("MLP recompute", 18),
    ("blocks again", 12),
    ("split", 5),
    ("state GiB", 9),
    ("needs GiB", 9),
    ("sent GiB", 8),
    ("s/step", 8),
    ("tokens/s", 10),
)


def wrapped(notes: Sequence[Note]) -> Iterator[str]:
    """Yield notes in lines of the report's width."""
    for note in notes:
        text = f"WARNING: {note.text}" if note.is_warning else note.text
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def smallest_world(config: Config, asked: Config, device_type: str, device_bytes: int) -> Fit:
    """Return the fewest GPUs that fit, and changes of options for them; `config` is resolved for one.

    Raises:
        UsageError: if no number of GPUs fits.
    """
    assert config.batch.batch_size, "resolved"
    least = config.distributed.tensor_parallel
    question = Question(asked, config.batch.batch_size, least, device_type, device_bytes).limited()
    fit = _in_time(lambda: cheapest_fit(question) or fewest_sharing_ranks(question))
    if fit is None:
        (*_, line) = advice(question, config.batch.batch_size)
        raise UsageError(f"--world_size=auto: {line}")
    return fit


def _in_time(find: Callable[[], Fit | None]) -> Fit | None:
    """Return what a limited search finds; None if it takes too long, too."""
    try:
        return find()
    except SearchTooLongError:
        return None


def recommendation(
    plan: Plan, asked: Config, argv: Sequence[str], device_bytes: int, changes: Changes | None = None
) -> list[str]:
    """Return the lines that end with a command, or with the reason why none fits.

    asked: as typed, with `changes` by which the number of ranks fits.

    Raises:
        UsageError: if --write_sbatch cannot be written.
    """
    needed, batch_size = plan.needed_bytes(), plan.config.batch.batch_size
    assert batch_size, "resolved"
    question = Question(asked, batch_size, plan.world_size, plan.device_type, device_bytes)
    fits = needed <= device_bytes
    for search in _searches(plan, question):
        if (layouts := search.layouts()) or fits:
            break
    else:
        reason, *flags = advice(question, needed)
        return [*wrapped([Note(reason, is_warning=True)]), *flags]
    present = search.asked_layout(plan.config) if fits else None
    if present is not None:
        others = [layout for layout in layouts if layout.values() != present.values()]
        layouts = sorted([*others, present], key=lambda layout: layout.time.seconds)
    best = recommended(layouts, plan.config)
    verdict = _verdict(plan, present, best, device_bytes)
    return [
        *verdict,
        *_table(search, layouts, best),
        *_costs(search, best),
        *_command(asked, best, argv, changes or {}),
    ]


def _searches(plan: Plan, question: Question) -> Iterator[Search]:
    """Yield searches until one finds something: the ranks as asked, ranks that share more layers, more ranks."""

    def search(sharing: Changes, asked: Config, ranks: int) -> Search:
        speeds = _speeds(plan, asked.distributed, ranks)
        return Search(asked, question.batch_size, ranks, plan.device_type, question.device_bytes, speeds, sharing)

    yield search({}, question.asked, plan.world_size)
    for changes, shared in with_more_sharing(question, same_ranks=True):
        if least_bytes(shared) <= question.device_bytes:
            yield search(changes, shared.asked, plan.world_size)
    if fit := _in_time(lambda: fewest_sharing_ranks(question.limited())):
        sharing = {name: fit.changes[name] for name in SHARING if name in fit.changes}
        yield search(sharing, unflatten({**flatten(question.asked), **sharing}), fit.world_size)


def _speeds(plan: Plan, options: DistributedConfig, ranks: int) -> Speeds:
    options = dataclasses.replace(plan.config.distributed, tensor_parallel=options.tensor_parallel)
    if options.machine_speeds is not None:
        measured = read_speeds(Path(options.machine_speeds))
        measured.check(plan.device_type, options.training_dtype, ranks)
        return measured
    if plan.device_type == "cpu":
        return cpu_sheet(options, max((os.cpu_count() or 1) // ranks, 1))
    return gpu_sheet(options, ranks)


def _verdict(plan: Plan, present: Layout | None, best: Layout, device_bytes: int) -> Iterator[str]:
    """Say whether the layout as asked fits, and how fast it would be."""
    needed, space = plan.needed_bytes() / GIB, device_bytes / GIB
    if present is not None:
        faster = present.time.seconds / best.time.seconds
        more = f"; the recommended layout is {faster:.2f} times as fast" if faster > 1.02 else "; no layout is faster"
        yield f"fits: {needed:,.1f} GiB of {space:,.1f} GiB; {present.time.seconds:,.3g} s a step predicted{more}"
        return
    where = "" if best.world_size == plan.world_size else f"; {best.world_size:,} GPUs are the fewest that fit"
    shared = best.config.distributed.tensor_parallel
    if shared > plan.config.distributed.tensor_parallel:
        where += f"; nothing does unless {shared} ranks share each layer"
    text = f"does not fit: {needed:,.1f} GiB of {space:,.1f} GiB{where}; the command below does"
    yield from wrapped([Note(text, is_warning=True)])


def _table(search: Search, layouts: Sequence[Layout], best: Layout) -> Iterator[str]:
    """The fastest layouts, with the recommended one."""
    shown = layouts[:ROWS]
    if best not in shown:
        shown = [*shown[:-1], best]
    on = "" if search.device_type == "cpu" else "GPU"
    shared = search.asked.distributed.tensor_parallel
    yield (
        f"layouts that fit {search.world_size:,} {on or 'rank'}{'s' * (search.world_size > 1)}, "
        f"{f'{shared} to a layer, ' if shared > 1 else ''}predicted, the fastest of {len(layouts)} (*: recommended):"
    )
    yield "  " + "  ".join(f"{name:>{width}}" for name, width in COLUMNS)
    for layout in shown:
        yield ("* " if layout is best else "  ") + "  ".join(
            f"{cell:>{width}}" for cell, (_, width) in zip(_cells(layout), COLUMNS, strict=True)
        )
    for line in [*search.speeds.assumptions(search.world_size), *_other_threads(search, best.config)]:
        yield from wrapped([Note(f"  {line}")])


def _other_threads(search: Search, config: Config) -> Iterator[str]:
    """Say that a run would use another number of threads than the measured speeds are of."""
    speeds = search.speeds
    if isinstance(speeds, MeasuredSpeeds) and speeds.device_type == "cpu":
        chosen = choose_threads(config, search.world_size, search.world_size)
        if chosen.number != speeds.threads:
            number = f"{chosen.number} thread{'s' * (chosen.number > 1)}"
            yield f"here the run has {number} a rank ({chosen.reason}): measure again with --threads={chosen.number}"


def _cells(layout: Layout) -> Iterator[str]:
    config = layout.config
    batch, stages, recompute = config.batch, config.multi_stage, config.performance
    assert batch.depth_first_micro_batches and batch.breadth_first_micro_batches
    order = "breadth" if batch.breadth_first_micro_batches > 1 else "depth"
    count = batch.depth_first_micro_batches * batch.breadth_first_micro_batches
    yield str(stages.zero_stage)
    yield f"{batch.micro_batch_size} x {count:,} {order}" if count > 1 else f"{batch.micro_batch_size} x 1"
    yield recompute.mlp_recompute_level
    yield f"{recompute.recompute_layers} of {config.model.num_layers}"
    yield "yes" if stages.split_master_weights else "no"
    yield f"{layout.state_bytes / GIB:,.1f}"
    yield f"{layout.needed_bytes / GIB:,.1f}"
    yield f"{layout.wire_bytes / GIB:,.1f}"
    yield f"{layout.time.seconds:,.3g}"
    yield f"{layout.time.tokens_per_s:,.0f}"


def _costs(search: Search, best: Layout) -> Iterator[str]:
    """Time, share of the peak, and disk of the recommended run."""
    config, time = best.config, best.time
    iterations = config.training.train_iters
    parts = {**time.parts, "exchange that nothing hides": time.exposed_s}
    shares = ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in parts.items() if seconds > 0)
    hidden_s = time.communication_s - time.exposed_s
    hidden = f"; {hidden_s:,.3g} s of exchange are hidden" if hidden_s > 0 else ""
    yield from wrapped([Note(f"a step of {time.seconds:,.3g} s: {shares}{hidden}")])
    seconds = time.seconds * iterations
    gpu_hours = "" if search.device_type == "cpu" else f", {seconds / 3600 * best.world_size:,.1f} GPU-hours"
    tokens = consumed_tokens(config.batch, iterations)
    yield f"the run: {iterations:,} iterations, {tokens:,} tokens, {hours(seconds)} of training{gpu_hours}"
    yield from _epochs(config, best.world_size)
    size = files_bytes(search.planner.partition(config).model, best.world_size, iterations)
    kept = config.checkpoint.max_checkpoints or 1
    gb = f"{size / 1e9:,.2f} GB"
    yield f"disk: {size:,} bytes a checkpoint ({gb}) beside its manifest, {kept} kept and one more during a save"


def _epochs(config: Config, world_size: int) -> Iterator[str]:
    """Say how often training reads the data, if it is on this machine; nothing else of a plan needs it."""
    if config.data.dataset_source == "random" or not (config.data.data_path and config.training.train_iters):
        return
    try:
        source = open_data(config, 0, world_size // config.distributed.tensor_parallel)
    except (RunError, OSError) as error:
        yield from wrapped([Note(f"epochs over the data: unknown; {str(error).partition(';')[0]}")])
        return
    described = source.describe()
    source.close()
    parts = [text for name, text in described.items() if name.startswith("data ")]
    if len(parts) > 1:
        yield from wrapped([Note(f"data: {text}") for text in parts])
    yield from wrapped([Note(f"training data: {described['training data']}")])


def _command(asked: Config, best: Layout, argv: Sequence[str], changes: Changes) -> Iterator[str]:
    """The command of the recommended layout; with --write_sbatch the job, too. changes: made before the search."""
    changes = {**changes, **fewest_changes(asked, best)}
    words = changed_words(argv, changes)
    chosen = [name for name in changes if name in (*SHARING, *SEARCHED)]
    note = f" (it sets {', '.join(f'--{name}' for name in chosen)})" if chosen else ""
    shared = best.config.distributed.tensor_parallel
    yield f"run this{note}:"
    for line in quoted([*launcher(best.world_size, GPUS_PER_NODE, shared), PROGRAM, *words]).split("\n"):
        yield f"  {line}"
    if (path := asked.distributed.write_sbatch) is not None:
        seconds = best.time.seconds * best.config.training.train_iters
        write_job(Path(path), words, layout_of_nodes(best.world_size, GPUS_PER_NODE, shared), seconds)
        yield f"wrote {path}; submit it with: sbatch {path}"
