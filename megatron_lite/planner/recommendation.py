"""Write the end of a dry run: layouts that fit, their predicted speed, and a command that runs the
best one."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.checkpoint.writing import files_bytes
from megatron_lite.config import Config
from megatron_lite.config.dimensions import ranks_per_layer, ranks_per_sample
from megatron_lite.config.values import counted
from megatron_lite.data.open_data import open_data
from megatron_lite.errors import RunError, UsageError
from megatron_lite.planner.command import (
    PROGRAM,
    changed_words,
    hours,
    launcher,
    layout_of_nodes,
    quoted,
    write_job,
)
from megatron_lite.planner.devices import GIB
from megatron_lite.planner.plan import Plan
from megatron_lite.planner.search import (
    SEARCH_S,
    SEARCHED,
    SPARE,
    WIDE,
    WIDENED,
    Changes,
    Layout,
    Search,
    SearchTooLongError,
    fewest_changes,
    recommended,
)
from megatron_lite.run.host import choose_threads
from megatron_lite.run.progress_line import aligned
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.validation.rules import Note

WIDTH = 118
ROWS = 10  # layouts to show
TITLES = (
    "ZeRO",
    "micro-batches",
    "MLP recompute",
    "recomputed blocks",
    "split",
    "state GiB",
    "needs GiB",
    "sent GiB",
)


def wrapped(*notes: Note | str) -> Iterator[str]:
    """Yield notes in lines of the report's width; texts become remarks."""
    for note in notes:
        text = note if isinstance(note, str) else f"{'WARNING: ' * note.is_warning}{note.text}"
        yield from textwrap.wrap(
            text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def smallest_world(search: Search) -> Search:
    """Return the search on the fewest GPUs that fit.

    search: on the smallest possible number of GPUs.

    Raises:
        UsageError: if no number of GPUs fits.
    """
    try:
        found = search if search.least_bytes <= search.usable_bytes else search.on_fewest_ranks()
        if found is not None and found.layouts:
            return found
    except SearchTooLongError:
        pass
    raise UsageError(f"--world_size=auto: {_no_layout(search, search.needed_bytes({}) or 0)}")


def recommendation(plan: Plan, changes: Changes, search: Search, argv: Sequence[str]) -> list[str]:
    """Return lines that end with a command, or with the reason why no layout fits.

    Args:
        changes: with these, the options as asked resolve to the plan's.
        search: on the plan's ranks.

    Raises:
        UsageError: if --write_sbatch cannot be written.
    """
    asked, needed = search.asked, plan.needed_bytes()
    fits = needed <= search.device_bytes
    try:
        search = next(wider for wider in search.wider() if wider.layouts or fits)
    except (StopIteration, SearchTooLongError):
        return [*wrapped(Note(_no_layout(search, needed), is_warning=True))]
    layouts, present = search.layouts, None
    if fits:
        present = search.layout(plan.config, changes)
        others = [layout for layout in layouts if layout.values() != present.values()]
        layouts = sorted([*others, present], key=lambda layout: layout.time.seconds)
    best = recommended(layouts, plan.config, search.usable_bytes)
    return [
        *_verdict(plan, present, best, search),
        *_table(search, layouts, best),
        *_costs(search, best),
        *_command(asked, best, argv),
    ]


def _no_layout(search: Search, needed: int) -> str:
    """Return the message that no layout fits, with a rank's memory under every memory-saving option
    and on the most GPUs."""
    said = f"does not fit: {needed / GIB:,.1f} GiB of {search.device_bytes / GIB:,.1f} GiB"
    try:
        if (least := search.least_bytes) < math.inf:
            said += f", {least / GIB:,.1f} GiB with the highest ZeRO stage, micro-batches of 1 and recomputation"
        if (fewest := search.on_fewest_ranks()) is not None:
            ranks = fewest.world_size
            said += f"; no flags fit {counted(search.world_size, 'GPU')}, and {ranks:,} GPUs are the fewest that fit"
            return f"{said}: plan for them with --world_size={ranks}"
        more = search.larger_sizes()
        if (
            more
            and (least := dataclasses.replace(search, world_size=more[-1]).least_bytes) < math.inf
        ):
            said += f", {least / GIB:,.1f} GiB on {more[-1]:,} GPUs, the most that share its batch"
    except SearchTooLongError:
        less = "use a smaller model, smaller micro-batches, a higher --zero_stage, or more ranks"
        return f"{said}; the search for flags that fit was given up after {SEARCH_S:g} s; {less}"
    return (
        f"{said}; no flags fit: use a smaller model, shorter samples, or devices with more memory"
    )


def _verdict(plan: Plan, present: Layout | None, best: Layout, search: Search) -> Iterator[str]:
    """Yield lines on whether the requested layout fits, and how fast it would be."""
    needed, space = plan.needed_bytes() / GIB, search.device_bytes / GIB
    if present is not None:
        faster = present.time.seconds / best.time.seconds
        more = (
            f"; the recommended layout is {faster:.2f} times as fast"
            if faster > 1.02
            else "; no layout is faster"
        )
        if plan.needed_bytes() > search.usable_bytes:
            roomier = best.plan.needed_bytes() <= search.usable_bytes
            more = f"; less than {SPARE:.0%} are free{', unlike with the recommended layout' if roomier else ''}"
        text = f"fits: {needed:,.1f} GiB of {space:,.1f} GiB; {present.time.seconds:,.3g} s a step predicted{more}"
        yield from wrapped(text)
        return
    nearest, where = WIDENED[0].option, ""
    size, asked = (getattr(one.config.distributed, nearest) for one in (best, plan))
    if size > asked:
        where = f"; nothing does with less than --{nearest}={size}"
    text = f"does not fit: {needed:,.1f} GiB of {space:,.1f} GiB{where}; the command below does"
    yield from wrapped(Note(text, is_warning=True))


def _table(search: Search, layouts: Sequence[Layout], best: Layout) -> Iterator[str]:
    """Yield a table of the fastest layouts, including the recommended one."""
    shown = layouts[:ROWS]
    if best not in shown:
        shown = [*shown[:-1], best]
    ranks = counted(search.world_size, "rank" if search.device_type == "cpu" else "GPU")
    if search.device_type == "cuda" and not search.speeds.path:
        ranks += f" ({search.speeds.device})"
    sizes = {f"{row.letter}P": search.sizes[row.name] for row in WIDENED}
    several = "".join(f"{name} {size}, " for name, size in sizes.items() if size > 1)
    yield (
        f"layouts that fit {ranks}, {several}predicted, the fastest of {len(layouts)} (*: recommended):"
    )
    rows = [
        ("", *TITLES, "s/step", "tokens/s"),
        *(("*" * (layout is best), *_cells(layout)) for layout in shown),
    ]
    yield from aligned(rows, ())
    found = [*search.speeds_of(best.config).assumptions, *_other_threads(search, best.config)]
    if search.is_over:
        found.append(
            f"others may be faster: the search was cut after {SEARCH_S:g} s of processor time"
        )
    for line in found:
        yield from wrapped(f"  {line}")


def _other_threads(search: Search, config: Config) -> Iterator[str]:
    """Warn if the run's number of threads differs from the one at which the speeds were
    measured."""
    speeds = search.speeds
    if speeds.path and speeds.device_type == "cpu":
        chosen = choose_threads(config, search.world_size, search.world_size)
        if chosen.number != speeds.threads:
            number = counted(chosen.number, "thread")
            yield f"here the run has {number} a rank ({chosen.reason}): measure again with --threads={chosen.number}"


def _cells(layout: Layout) -> Iterator[str]:
    config = layout.config
    batch = config.batch
    stages = config.multi_stage
    recompute = config.performance
    order = "breadth" if batch.breadth_first_micro_batches > 1 else "depth"
    count = batch.depth_first_micro_batches * batch.breadth_first_micro_batches
    yield f"{stages.zero_stage}" + (
        f", S={shard}" if (shard := config.distributed.data_parallel_shard) else ""
    )
    yield (
        f"{batch.micro_batch_size} x {count:,} {order}"
        if count > 1
        else f"{batch.micro_batch_size} x 1"
    )
    yield recompute.mlp_recompute_level
    yield f"{recompute.recompute_layers} of {config.model.num_layers}"
    yield "yes" if stages.split_master_weights else "no"
    yield f"{layout.plan.state_bytes / GIB:,.1f}"
    yield f"{layout.plan.needed_bytes() / GIB:,.1f}"
    yield f"{sum(total.wire_bytes for total in layout.plan.traffic.values()) / GIB:,.1f}"
    yield f"{layout.time.seconds:,.3g}"
    yield f"{layout.time.tokens_per_s:,.0f}"


def _costs(search: Search, best: Layout) -> Iterator[str]:
    """Yield the recommended run's time, its shares, and disk space."""
    config, time = best.config, best.time
    iterations = config.training.train_iters
    parts = {**time.parts, "exposed communication": time.exposed_s}
    shares = ", ".join(
        f"{name} {seconds / time.seconds:.0%}" for name, seconds in parts.items() if seconds > 0
    )
    hidden_s = time.communication_s - time.exposed_s
    hidden = f"; {hidden_s:,.3g} s of communication are overlapped" if hidden_s > 0 else ""
    yield from wrapped(f"a step of {time.seconds:,.3g} s: {shares}{hidden}")
    seconds = time.seconds * iterations
    gpu_hours = (
        ""
        if search.device_type == "cpu"
        else f", {seconds / 3600 * best.plan.world_size:,.1f} GPU-hours"
    )
    tokens = batch_schedule(config.batch).consumed_tokens(iterations)
    yield f"the run: {iterations:,} iterations, {tokens:,} tokens, {hours(seconds)} of training{gpu_hours}"
    yield from _epochs(config, best.plan.world_size)
    size = files_bytes(best.plan.model, best.plan.world_size, iterations)
    kept = f"{config.checkpoint.max_checkpoints or 1} kept{', the best one' * bool(config.checkpoint.keep_best)}"
    gb = f"{size / 1e9:,.2f} GB"
    yield f"disk: {size:,} bytes a checkpoint ({gb}) and its manifest, {kept} and one more during a save"


def _epochs(config: Config, world_size: int) -> Iterator[str]:
    """Yield how often training reads the data, if it is on this machine; nothing else in a plan
    needs it."""
    if config.data.dataset_source == "random" or not (
        config.data.data_path and config.training.train_iters
    ):
        return
    try:
        source = open_data(config, 0, world_size // ranks_per_sample(config.distributed))
    except (RunError, OSError) as error:
        yield from wrapped(f"epochs over the data: unknown; {str(error).partition(';')[0]}")
        return
    described = source.description
    source.close()
    parts = [text for name, text in described.items() if name.startswith("data ")]
    if len(parts) > 1:
        yield from wrapped(*(f"data: {text}" for text in parts))
    yield from wrapped(f"training data: {described['training data']}")


def _command(asked: Config, best: Layout, argv: Sequence[str]) -> Iterator[str]:
    """Yield the recommended layout's command; with --write_sbatch also write its job."""
    changes = fewest_changes(asked, best)
    words = changed_words(argv, changes)
    chosen = [name for name in changes if name in (*WIDE, *SEARCHED)]
    note = f" (it sets {', '.join(f'--{name}' for name in chosen)})" if chosen else ""
    nodes = layout_of_nodes(best.plan.world_size, ranks_per_layer(best.config.distributed))
    yield f"run this{note}:"
    for line in quoted([*launcher(*nodes), PROGRAM, *words]).split("\n"):
        yield f"  {line}"
    if (path := asked.distributed.write_sbatch) is not None:
        seconds = best.time.seconds * best.config.training.train_iters
        write_job(Path(path), words, nodes, seconds)
        yield f"wrote {path}; submit it with: sbatch {path}"
