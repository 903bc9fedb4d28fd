"""From a configuration to everything that a training loop needs, in the order in which things can go wrong."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lite.checkpoint import compatibility, sharded
from megatron_lite.cli.help import banner
from megatron_lite.config import Config
from megatron_lite.data.loader import DataSource
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed, deterministic_ways
from megatron_lite.distributed.traffic import Traffic
from megatron_lite.generation.samples import Samples, open_samples
from megatron_lite.huggingface import load_pretrained
from megatron_lite.huggingface.export_checks import check_exports
from megatron_lite.huggingface.open_source import WeightSource
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.kernels.cross_entropy import held_logits
from megatron_lite.kernels.linear import describe_products
from megatron_lite.model import parameter_patterns
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.model.gpt import model_layers, parameters_of, shapes_of
from megatron_lite.model.layer import Layer
from megatron_lite.monitor.export_callback import ExportCallback, open_callback
from megatron_lite.monitor.logging import start_logging
from megatron_lite.monitor.metrics import LogWindow, StepTimer, known_peak_tflops
from megatron_lite.monitor.tensor_debug import TensorDebugger, open_debugger
from megatron_lite.monitor.trackers import Trackers, open_trackers
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.optimizer.rules import muon
from megatron_lite.parameter import DTYPES
from megatron_lite.planner.auto import device_memory_bytes, resolve_auto
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.launch import environment_with
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.schedules.batch_size import Split, batch_schedule, consumed_tokens
from megatron_lite.validation import warnings
from megatron_lite.validation.messages import Note
from megatron_lite.zero.multi_stage import MemoryRow, MultiStage

MIB = 2**20


@dataclass
class Run:
    """One start of a run, ready to train from `iteration`."""

    config: Config
    distributed: Distributed
    experiment: Experiment
    logger: logging.Logger
    data: DataSource
    model: MultiStage
    optimizer: Optimizer
    window: LogWindow
    timer: StepTimer
    trackers: Trackers
    stop: StopSignal
    iteration: int  # iterations done
    evaluation_due: bool  # what is due after `iteration` is not done: a stop request came first
    collectives_alone_s: dict[str, float]  # see `MultiStage.time_collectives`; empty without --log_communication
    debugger: TensorDebugger | None  # None without debug options
    callback: ExportCallback
    samples: Samples | None  # None: none are asked for


def build(
    config: Config,
    distributed: Distributed,
    experiment: Experiment,
    stop: StopSignal,
    notes: tuple[Note, ...],
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Open, check, allocate, resume. Every rank calls this; an error on any of them is raised on all.

    `environment`: of --export_callback_env, which `config` does not hold.

    Raises:
        RunError: of the kind that fits, before any training.
    """
    logger = _open_log(config, distributed, experiment)
    check_exports(config)
    script = config.training.export_callback_script if distributed.rank == 0 else ""
    variables = environment or {}
    callback = together(distributed, lambda: open_callback(script, environment_with(variables), variables))
    config, choices = _choose(config, distributed)
    data = together(distributed, lambda: open_data(config, distributed.rank, distributed.world_size))
    samples = open_samples(config, distributed, experiment, stop)
    kernels = together(distributed, lambda: choose_kernels(config, distributed.device))
    layers = together(distributed, lambda: model_layers(config, kernels))
    for line in banner(config, derived_numbers(config, layers, distributed, data)).splitlines():
        logger.info(line)
    logger.info(kernels.describe())
    if config.training.train_iters > 0 and config.optimizer.weight_decay > 0:
        logger.info(parameter_patterns.describe(parameters_of(layers)))
    if config.distributed.deterministic:
        logger.info(deterministic_ways(distributed.device, kernels.triton))
    for note in (*choices, *notes):
        logger.log(logging.WARNING if note.is_warning else logging.INFO, note.text)
    for warning in (*warnings(config), *memory_warnings(config, distributed)):
        logger.warning(warning)
    if experiment.checkpoints is not None:
        together(distributed, lambda: _check_architecture(config, experiment))
    source = _open_source(config, distributed, experiment, logger, layers)
    model = together(distributed, lambda: _allocate(config, distributed, layers))
    for line in (*split_lines(model), *memory_lines(model)):
        logger.info(line)
    if config.optimizer.whole_matrices and model.training:
        logger.info(muon.describe(model.stages))
    logger.info(describe_products(distributed.device, model.precision.training, model.precision.gradients))
    collectives_alone_s = _time_collectives(config, distributed, model)
    optimizer = Optimizer(config, model.stages, distributed, kernels)
    window = LogWindow(distributed.device)
    iteration, evaluation_due = _resume(config, distributed, experiment, logger, model, optimizer, window, source)
    debugger = _debug(config, distributed, experiment, logger, model)
    with distributed.traffic.paused():
        model.gather_ahead()  # as every iteration leaves it for the next one
    trackers = together(
        distributed,
        lambda: open_trackers(config, experiment.root, experiment.run) if distributed.rank == 0 else Trackers(),
    )
    timer = StepTimer(
        config, distributed.world_size, iteration, config.run.peak_tflops or _device_peak_tflops(distributed)
    )
    return Run(
        config,
        distributed,
        experiment,
        logger,
        data,
        model,
        optimizer,
        window,
        timer,
        trackers,
        stop,
        iteration,
        evaluation_due,
        collectives_alone_s,
        debugger,
        callback,
        samples,
    )


def _choose(config: Config, distributed: Distributed) -> tuple[Config, tuple[Note, ...]]:
    """Numbers in place of `auto`, the same on all ranks: those that fit the smallest device."""
    memory = device_memory_bytes(distributed.device, distributed.local_world_size)
    memory = -distributed.agree_max(-memory)
    multi_stage, choices = together(
        distributed, lambda: resolve_auto(config, distributed.world_size, distributed.device.type, memory)
    )
    return dataclasses.replace(config, multi_stage=multi_stage), choices


def _open_log(config: Config, distributed: Distributed, experiment: Experiment) -> logging.Logger:
    all_ranks = config.run.enable_all_loggers
    return start_logging(
        experiment.log_file(distributed.rank),
        distributed.rank,
        distributed.world_size,
        to_console=distributed.rank == 0 or all_ranks,
        timestamps=config.run.log_timestamps,
        all_ranks=all_ranks,
    )


def _allocate(config: Config, distributed: Distributed, layers: list[Layer]) -> MultiStage:
    dtype, training = config.distributed.training_dtype, not config.training.inference
    return MultiStage(
        layers,
        config.multi_stage,
        config.batch,
        dtype,
        distributed,
        training,
        moments=config.optimizer.moments,
        whole_matrices=config.optimizer.whole_matrices,
        averaged=config.averaging.enabled,
    )


def _time_collectives(config: Config, distributed: Distributed, model: MultiStage) -> dict[str, float]:
    """For --log_communication: from here on waits are timed, and each collective has run alone."""
    if not config.run.log_communication:
        return {}
    distributed.traffic = Traffic(distributed.world_size, timed=True, device_type=distributed.device.type)
    with distributed.traffic.paused():
        return model.time_collectives(distributed.barrier)


def _check_architecture(config: Config, experiment: Experiment) -> None:
    """Refuse a changed architecture before a model of the wrong size is allocated."""
    assert experiment.checkpoints is not None
    newest = sharded.newest_config(experiment.checkpoints)
    if newest is not None:
        iteration, saved = newest
        compatibility.check_architecture(saved, config, str(experiment.checkpoints / str(iteration)))


def _open_source(
    config: Config, distributed: Distributed, experiment: Experiment, logger: logging.Logger, layers: list[Layer]
) -> WeightSource | None:
    """The pretrained weights to start from; None: there are none, or the run has a checkpoint of its own."""
    if config.source.pretrained_checkpoint_path is None or not config.source.load_pretrained_weights:
        return None
    root = experiment.checkpoints
    own = together(distributed, lambda: sharded.newest_iteration(root) if root and distributed.rank == 0 else None)
    if distributed.broadcast_object(own) is not None:
        return None
    return load_pretrained.open_pretrained(config, shapes_of(layers), distributed, logger.warning)


def _start_from(
    source: WeightSource,
    config: Config,
    distributed: Distributed,
    logger: logging.Logger,
    model: MultiStage,
    optimizer: Optimizer,
) -> None:
    """Pretrained weights, and the state of the optimizer if asked for; iterations, schedule and data begin anew."""
    with source:
        load_pretrained.load_weights(source, model, distributed)
        logger.info("weights of %s (%s)", source.folder, source.describe())
        if config.source.load_pretrained_optimizer and model.training:
            state, note = load_pretrained.load_moments(source, model, distributed, config.optimizer.optimizer)
            optimizer.load_rule(state)
            logger.info("  with the state of its optimizer, after %s updates", f"{state['updates']:,}")
            if note is not None:
                logger.warning(note)


def _resume(
    config: Config,
    distributed: Distributed,
    experiment: Experiment,
    logger: logging.Logger,
    model: MultiStage,
    optimizer: Optimizer,
    window: LogWindow,
    source: WeightSource | None,
) -> tuple[int, bool]:
    """Load the newest good checkpoint, or start from the pretrained weights in `source`, or initialise; returns the
    iterations done, and whether an evaluation is due.
    """
    loaded, now = None, config.optimizer.optimizer
    if experiment.checkpoints is not None:
        loaded = sharded.load_newest(experiment.checkpoints, model, distributed, logger.warning, now)
    if loaded is None:
        if source is None:
            model.initialize(config.distributed.seed)
        else:
            _start_from(source, config, distributed, logger, model, optimizer)
        optimizer.averaging.start()
        return 0, False
    compatibility.check_architecture(loaded.config, config, str(loaded.folder))
    model.invalidate()
    before = compatibility.saved_optimizer(loaded.config)
    optimizer.load_state(compatibility.optimizer_state(loaded.state, before, now))
    # Checkpoints without a batch size schedule are those of one size.
    window.load_state(loaded.state["window"], loaded.config["batch_size"] * loaded.config["sequence_length"])
    resharded = f", saved by {loaded.world_size} ranks" if loaded.world_size != distributed.world_size else ""
    logger.info("resumed from %s at iteration %d%s", loaded.folder, loaded.iteration, resharded)
    if config.averaging.enabled and optimizer.averaging.updates == 0:
        logger.info("  averaging (--ema_type=%s) begins now, from these weights", config.averaging.ema_type)
    for difference in compatibility.differences(loaded.config, config):
        logger.info("  changed since that checkpoint (the command line wins): %s", difference)
    moved = compatibility.moved_samples(loaded.config, config, loaded.iteration)
    for caution in (moved, compatibility.other_decay(loaded.config, config)):
        if caution is not None:
            logger.warning(caution)
    return loaded.iteration, loaded.state.get("evaluation_due", False)


def _debug(
    config: Config, distributed: Distributed, experiment: Experiment, logger: logging.Logger, model: MultiStage
) -> TensorDebugger | None:
    """Log the initial (or loaded) weights and observe the stages, if a debug option asks for it."""
    debugger = open_debugger(
        config, logger, distributed.rank, distributed.world_size, distributed.gather_tensors, experiment.artifacts
    )
    if debugger is not None:
        debugger.attach(model)
        with debugger.phase("init"):
            debugger.parameters_initialized(model)
    return debugger


def derived_numbers(config: Config, layers: list[Layer], distributed: Distributed, data: DataSource) -> dict[str, str]:
    """What follows from the options, for the banner."""
    batch, sizes = config.batch, batch_schedule(config.batch).sizes
    assert batch.micro_batch_size and batch.breadth_first_micro_batches
    shape = (batch.micro_batch_size, distributed.world_size, batch.breadth_first_micro_batches)
    tokens = _smallest_to_largest([size * batch.sequence_length for size in sizes])
    micro_batches = _smallest_to_largest([Split(size, *shape).micro_steps for size in sizes])
    parameters = sum(parameter.spec.numel for parameter in parameters_of(layers))
    return {
        "parameters": f"{parameters:,}",
        "tokens per iteration": tokens,
        "tokens in all": f"{consumed_tokens(batch, config.training.train_iters):,}",
        "micro-batches per rank": f"{micro_batches} of {batch.micro_batch_size} samples",
        "ranks": str(distributed.world_size),
        "device": describe_device(distributed.device),
        "versions": f"torch {torch.__version__}, python {platform.python_version()}",
        **data.describe(),
    }


def _smallest_to_largest(numbers: Sequence[int]) -> str:
    return " to ".join(f"{number:,}" for number in dict.fromkeys((min(numbers), max(numbers))))


def split_lines(model: MultiStage) -> list[str]:
    """How the layers are grouped, and what is frozen."""
    blocks = [len(stage) for stage in model.split[1:-1]]
    shown = ", ".join(map(str, blocks)) if len(set(blocks)) > 1 else f"{blocks[0]} each"
    weights, gradients = model.buffer_counts()
    frozen = sum(slot.numel for _, part in model.parts() if part.frozen for slot in part.layout.slots)
    lines = [
        f"{len(model.stages)} stages: embedding, {sum(blocks)} blocks in {len(blocks)} stages ({shown}), head; "
        f"{weights} weight and {gradients} gradient buffers"
    ]
    if frozen:
        lines.append(f"{frozen:,} of {model.num_parameters:,} parameters are frozen")
    return lines


def memory_lines(model: MultiStage) -> list[str]:
    """State memory of this rank: kind, count, MiB, and the total."""
    rows = [row for row in model.memory_table() if row.bytes]
    total = MemoryRow("state memory per rank", sum(row.count for row in rows), sum(row.bytes for row in rows))
    return [f"  {row.kind:.<24} {row.count:4d} {row.bytes / MIB:14,.2f} MiB" for row in (*rows, total)]


def memory_warnings(config: Config, distributed: Distributed) -> list[str]:
    """Whether the logits of one micro-batch could not be held at once here."""
    batch = config.batch
    assert batch.micro_batch_size is not None
    evaluated = batch.eval_micro_batch_size or 0 if config.training.validation_iters else 0
    tokens = max(batch.micro_batch_size, evaluated) * batch.sequence_length
    itemsize, performance = DTYPES[config.distributed.training_dtype].itemsize, config.performance
    chunk = chunk_tokens(performance.cross_entropy_splits, tokens, distributed.device, itemsize)
    rows, columns = held_logits(tokens, config.model.padded_vocab_size, chunk, performance.cross_entropy_block_size)
    logits_bytes, held_bytes = tokens * config.model.vocab_size * itemsize, rows * columns * itemsize
    free = free_bytes(distributed.device)
    if free is None or logits_bytes <= free:
        return []
    return [
        f"the logits of one micro-batch ({tokens:,} tokens x {config.model.vocab_size:,} x {itemsize} bytes = "
        f"{logits_bytes / MIB:,.0f} MiB) exceed the free memory ({free / MIB:,.0f} MiB); {held_bytes / MIB:,.0f} MiB "
        "of them are held at a time, but activations may not fit either: consider a smaller --micro_batch_size"
    ]


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on a device, or None where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields: dict[str, Any] = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def describe_device(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"cpu, {os.cpu_count()} cores, {torch.get_num_threads()} threads per rank"


def _device_peak_tflops(distributed: Distributed) -> float | None:
    if distributed.device.type != "cuda":
        return None
    return known_peak_tflops(torch.cuda.get_device_name(distributed.device))
