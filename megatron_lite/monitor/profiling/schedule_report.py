"""The times of a schedule as tables, as one line for the log, and as a trace that a browser shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_lite.monitor.logging import MIB
from megatron_lite.monitor.profiling.schedule_times import (
    COMPUTING,
    IterationTimes,
    StepTime,
    Transfer,
    hid_behind,
    parts,
)
from megatron_lite.monitor.profiling.watched_stage import range_name

SHOWN_BEHIND = 2  # computations that a collective hid behind, in its row


def mean_parts(profile: Sequence[IterationTimes]) -> dict[str, float]:
    """Return the seconds of an iteration by what they went into, as means over the iterations."""
    total: dict[str, float] = {}
    for times in profile:
        for name, seconds in parts(times).items():
            total[name] = total.get(name, 0.0) + seconds / len(profile)
    return total


def summary(profile: Sequence[IterationTimes]) -> str:
    """Return the line of the log: `schedule of iterations 3-4: 812.4 ms each: backward 55 %, forward 30 %, ...`."""
    shares = mean_parts(profile)
    wall_s = sum(shares.values())
    shown = sorted(shares.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {seconds / wall_s:.0%}" for name, seconds in shown if seconds >= 0.005 * wall_s)
    return f"schedule of {iterations_of(profile)}: {wall_s * 1e3:.2f} ms each: {listed}"


def iterations_of(profile: Sequence[IterationTimes]) -> str:
    """Return the iterations of a profile in words."""
    first, last = profile[0].iteration, profile[-1].iteration
    return f"iteration {first}" if first == last else f"iterations {first}-{last}"


def tables(profile: Sequence[IterationTimes], rank: int, world_size: int) -> str:
    """Return three tables: parts of an iteration, steps by stage, collectives by stage; means over the iterations."""
    shares = mean_parts(profile)
    wall_s = sum(shares.values())
    heads = [["part", "ms", "share"], ["step", "number", "ms", "ms each"]]
    heads.append(["collective", "number", "MiB", "takes ms", "exposed ms", "hidden ms", "while computing"])
    bodies = [
        [[name, _ms(seconds), f"{seconds / wall_s:.1%}"] for name, seconds in [*shares.items(), ("total", wall_s)]],
        list(_step_rows(profile)),
        list(_transfer_rows(profile)),
    ]
    title = f"schedule of {iterations_of(profile)}, rank {rank} of {world_size}; numbers and times of one iteration"
    return "\n\n".join([title, *(_aligned([head, *body]) for head, body in zip(heads, bodies, strict=True))])


def _step_rows(profile: Sequence[IterationTimes]) -> Iterator[list[str]]:
    groups: dict[tuple[str, int], list[StepTime]] = {}
    for verb in COMPUTING:
        for times in profile:
            for step in times.steps:
                if step.verb == verb:
                    groups.setdefault((verb, step.stage), []).append(step)
    for (verb, stage), steps in groups.items():
        seconds = sum(step.own_s for step in steps)
        yield [
            range_name(verb, stage, None),
            f"{len(steps) / len(profile):g}",
            _ms(seconds / len(profile)),
            _ms(seconds / len(steps)),
        ]


def _transfer_rows(profile: Sequence[IterationTimes]) -> Iterator[list[str]]:
    groups: dict[tuple[str, int], list[tuple[Transfer, IterationTimes]]] = {}
    for times in profile:
        for transfer in times.transfers:
            stage = -1 if transfer.stage is None else transfer.stage
            groups.setdefault((transfer.kind, stage), []).append((transfer, times))
    for (kind, stage), group in sorted(groups.items()):
        transfers, number = [transfer for transfer, _ in group], len(profile)
        yield [
            kind if stage < 0 else range_name(kind, stage, None),
            f"{len(group) / number:g}",
            f"{sum(transfer.bytes for transfer in transfers) / number / MIB:,.2f}",
            _ms(_total(transfer.takes_s for transfer in transfers), number),
            _ms(sum(transfer.exposed_s for transfer in transfers), number),
            _ms(_total(transfer.hidden_s for transfer in transfers), number),
            _behind(group),
        ]


def _behind(group: Sequence[tuple[Transfer, IterationTimes]]) -> str:
    """Name the computations that ran longest while the collectives were under way, each with its share of the time."""
    window_s = sum(
        max(min(transfer.under_way_s[1], transfer.waits_s) - transfer.under_way_s[0], 0.0) for transfer, _ in group
    )
    behind: dict[tuple[str, int], float] = {}
    for transfer, times in group:
        for name, seconds in hid_behind(transfer, times.steps).items():
            behind[name] = behind.get(name, 0.0) + seconds
    longest = sorted(behind.items(), key=lambda item: -item[1])[:SHOWN_BEHIND]
    return ", ".join(
        f"{range_name(verb, stage, None)} {seconds / window_s:.0%}"
        for (verb, stage), seconds in longest
        if seconds >= 0.01 * window_s
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ms(seconds: float | None, number: int = 1) -> str:
    return "-" if seconds is None else f"{seconds / number * 1e3:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in columns: the first one and a last one of words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = {0} | ({len(widths) - 1} if rows[0][-1] == "while computing" else set())
    lines = [
        "  ".join(
            cell.ljust(width) if index in words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def trace_events(profile: Sequence[IterationTimes], rank: int) -> dict[str, Any]:
    """Return a trace in the Trace Event Format, in microseconds from its first event.

    One process per rank; thread 0 has the steps, with waits inside of them, and the others the collectives under way,
    as many at a time as there are threads. Files of several ranks can be joined: append their `traceEvents`.
    """
    begun_s = [transfer.under_way_s[0] for times in profile for transfer in times.transfers]
    origin_s = min([times.start_s for times in profile] + begun_s)

    def event(name: str, thread: int, start_s: float, end_s: float, **values: Any) -> dict[str, Any]:
        start, end = round((start_s - origin_s) * 1e6, 3), round((end_s - origin_s) * 1e6, 3)
        return {"name": name, "ph": "X", "pid": rank, "tid": thread, "ts": start, "dur": end - start, "args": values}

    events, lanes_s = [], list[float]()  # when each thread for collectives becomes free
    for times in profile:
        events.append(event(f"iteration {times.iteration}", 0, times.start_s, times.end_s))
        for step in times.steps:
            name = range_name(step.verb, step.stage, step.micro_batch)
            events.append(event(name, 0, step.start_s, step.end_s, waited_ms=step.waited_s * 1e3))
        for transfer in sorted(times.transfers, key=lambda transfer: transfer.under_way_s):
            start_s, end_s = transfer.under_way_s
            name = transfer.kind if transfer.stage is None else range_name(transfer.kind, transfer.stage, None)
            events.append(event(f"wait for {name}", 0, transfer.waits_s, transfer.done_s))
            free = [lane for lane, until_s in enumerate(lanes_s) if until_s <= start_s]
            lane = free[0] if free else len(lanes_s)
            lanes_s[lane : lane + 1] = [end_s]
            values: dict[str, Any] = {"bytes": transfer.bytes, "exposed_ms": transfer.exposed_s * 1e3}
            if transfer.takes_s is not None and transfer.hidden_s is not None:
                values |= {"takes_ms": transfer.takes_s * 1e3, "hidden_ms": transfer.hidden_s * 1e3}
            events.append(event(name, lane + 1, start_s, end_s, **values))
    threads = ["steps", *(f"collectives {lane + 1}" for lane in range(len(lanes_s)))]
    names = [{"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}]
    names += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        for thread, name in enumerate(threads)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}
