"""Set up everything that training needs, in three phases: open inputs, allocate, resume."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_lite.checkpoint.resume import Choice, Resumed, check_early, choose_together, resume
from megatron_lite.checkpoint.retention import lack_at_start
from megatron_lite.checkpoint.writing import BackgroundSaves, open_background, shard_bytes
from megatron_lite.cli.help import banner, short_banner
from megatron_lite.config import Config
from megatron_lite.corpus.from_text import resolve_data
from megatron_lite.data.fingerprint import check_same
from megatron_lite.data.loader import DataSource
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.generation.samples import Samples, open_samples
from megatron_lite.huggingface import load_pretrained
from megatron_lite.huggingface.weight_source import WeightSource
from megatron_lite.kernels import matmul_library
from megatron_lite.kernels.choice import Kernels, agree_on_kernels
from megatron_lite.model.gpt import model_layers, shapes_of
from megatron_lite.model.layer import Layer
from megatron_lite.monitor.banner import choice_lines, derived_numbers, device_warnings, placement_warnings, stage_lines
from megatron_lite.monitor.communication import time_collectives
from megatron_lite.monitor.export_callback import ExportCallback, open_callback
from megatron_lite.monitor.logging import log_both, start_logging
from megatron_lite.monitor.memory_history import MemoryHistory, open_history
from megatron_lite.monitor.metric_lines import ConsoleLines
from megatron_lite.monitor.metrics import LogWindow, known_peak_tflops
from megatron_lite.monitor.step_timer import StepTimer
from megatron_lite.monitor.tensor_debug import TensorDebugger, open_debugger
from megatron_lite.monitor.trackers import Trackers, check_trackers, open_trackers
from megatron_lite.monitor.watch.watch import Watch, open_watch
from megatron_lite.optimizer.optimizer import Optimizer, rule_of
from megatron_lite.optimizer.rules import muon
from megatron_lite.planner.auto import device_memory_bytes, library_of_products, resolve_auto
from megatron_lite.run.ending import Ending
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.launch import environment_with
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.validation import warnings
from megatron_lite.validation.messages import Note
from megatron_lite.zero.multi_stage import MultiStage

if TYPE_CHECKING:
    from megatron_lite.monitor.profiling.profiles import Profiles


@dataclass
class Start:
    """The inputs of every phase of the set-up."""

    config: Config
    distributed: Distributed
    experiment: Experiment
    logger: logging.Logger


@dataclass
class Inputs:
    """The checked inputs of a run, and the layers to train."""

    data: DataSource
    kernels: Kernels
    layers: list[Layer]
    callback: ExportCallback


@dataclass
class Run(Start):
    """One start of a run, ready to train from `iteration`."""

    data: DataSource
    model: MultiStage
    optimizer: Optimizer
    window: LogWindow
    timer: StepTimer
    console: ConsoleLines
    trackers: Trackers
    stop: StopSignal
    iteration: int  # completed iterations
    evaluation_due: bool  # a stop request preempted the evaluations and exports due after `iteration`
    collectives_alone_s: dict[str, float]  # see `time_collectives`; empty without --log_communication
    debugger: TensorDebugger | None  # None without debug options
    profiles: Profiles | None  # None without --profile_cpu, --profile_cuda and --profile_schedule
    watch: Watch | None  # None without --watch
    callback: ExportCallback
    samples: Samples | None  # None without --sample_interval
    background: BackgroundSaves | None  # None without --async_checkpoint
    resumed: Resumed  # where this start began
    saved_s: float  # time.monotonic() of the last save, or of the start
    save_requested: bool = False  # by rank 0's clock, after the next iteration
    memory_history: MemoryHistory | None = None  # None without --memory_snapshot
    ending: Ending | None = None  # None for a run that was set up without `opened`
    bad_steps: list[int] = dataclasses.field(default_factory=list)  # iterations that `leave_bad_step` has examined
    evaluated: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)  # newest losses, by name
    agreed_at: int | None = None  # newest iteration at which --check_replicas_interval found no difference


def build(
    config: Config,
    distributed: Distributed,
    experiment: Experiment,
    stop: StopSignal,
    notes: tuple[Note, ...],
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Set up a run. All ranks call this together; an error on any rank is raised on all.

    notes: from the command line. environment: variables of --export_callback_env, which `config` does not hold.

    Raises:
        RunError: if the run cannot start; its class tells why.
    """
    experiment.when_lost(stop.fail)
    start, choice, found = _resolve(config, distributed, experiment)
    config, logger = start.config, start.logger
    kernels = agree_on_kernels(config, distributed)
    inputs = together(distributed, lambda: _open_inputs(start, environment or {}, kernels))
    check_same(inputs.data.identity, distributed)
    samples = open_samples(config, distributed, experiment, stop)
    _log_banner(start, inputs, (*found, *notes))
    memory_history = open_history(config, experiment.root, distributed, logger)
    together(distributed, lambda: check_early(choice, config, inputs.data.identity) if distributed.rank == 0 else None)
    source = None
    options = config.source
    if options.pretrained_checkpoint_path is not None and options.load_pretrained_weights and not choice.found:
        source = load_pretrained.open_pretrained(config, shapes_of(inputs.layers), distributed, logger.warning)

    distributed.progress.phase = "the loading"
    model = together(distributed, lambda: _allocate(start, inputs.layers))
    for line, short in stage_lines(model):
        _tell(start, line, short)
    if rule_of(config.optimizer).declared.whole_matrices and model.training:
        logger.info(muon.describe(model.stages))
    collectives_alone_s = _time_collectives(start, model)
    profiles = _open_profiles(start, model)
    optimizer = Optimizer(config, model.stages, distributed, inputs.kernels)

    window = LogWindow(distributed.device)
    resumed = _fill(start, choice, source, model, optimizer, window, inputs.data.identity)
    debugger = _debug(start, model)
    with distributed.traffic.paused():
        model.gather_ahead()  # every iteration ends with this
    reports, done = distributed.rank == 0, resumed.iteration
    num_bytes = shard_bytes(model) * distributed.world_size
    if reports and (lack := lack_at_start(experiment.checkpoints, num_bytes, config, done)):
        logger.warning(lack)
    background = open_background(config, model, distributed)
    trackers = together(distributed, lambda: open_trackers(config, experiment.root, experiment.run, reports, done))
    peak_tflops = config.run.peak_tflops
    if not peak_tflops and distributed.device.type == "cuda":
        peak_tflops = known_peak_tflops(torch.cuda.get_device_name(distributed.device))
    return Run(
        **vars(start),
        data=inputs.data,
        model=model,
        optimizer=optimizer,
        window=window,
        timer=StepTimer(config, distributed.world_size, done, peak_tflops),
        console=ConsoleLines(distributed.device.type),
        trackers=trackers,
        stop=stop,
        iteration=done,
        evaluation_due=resumed.evaluation_due,
        collectives_alone_s=collectives_alone_s,
        debugger=debugger,
        profiles=profiles,
        watch=open_watch(config, model, optimizer.loss_scale.scale, distributed, trackers),
        callback=inputs.callback,
        samples=samples,
        background=background,
        resumed=resumed,
        saved_s=time.monotonic(),
        memory_history=memory_history,
    )


# -- open the inputs ----------------------------------------------------------------------------------------------


def _resolve(
    config: Config, distributed: Distributed, experiment: Experiment
) -> tuple[Start, Choice, tuple[Note, ...]]:
    """Open the log, resolve `auto` and text data in the configuration, and choose the checkpoints to resume from."""
    rank, all_ranks = distributed.rank, config.run.enable_all_loggers
    log_file, to_console = experiment.log_file(rank), rank == 0 or all_ranks
    logger = start_logging(
        log_file, rank, distributed.world_size, to_console, config.run.log_timestamps, all_ranks=all_ranks
    )
    config, sizes = _resolve_auto(config, distributed)
    config = resolve_data(config, distributed, experiment.root, logger)
    choice = choose_together(experiment.checkpoints, config.checkpoint, distributed)
    config, library = _choose_products(config, distributed, choice)
    return Start(config, distributed, experiment, logger), choice, (*sizes, *library)


def _resolve_auto(config: Config, distributed: Distributed) -> tuple[Config, tuple[Note, ...]]:
    """Replace `auto` by values that fit the smallest device, equal on all ranks."""
    memory_bytes = device_memory_bytes(distributed.device, distributed.local_world_size)
    smallest, device_type = -distributed.agree_max(-memory_bytes), distributed.device.type
    multi_stage, choices = together(
        distributed, lambda: resolve_auto(config, distributed.world_size, device_type, smallest)
    )
    return dataclasses.replace(config, multi_stage=multi_stage), choices


def _choose_products(config: Config, distributed: Distributed, choice: Choice) -> tuple[Config, tuple[Note, ...]]:
    """Resolve and apply --cpu_matmul: a resumed run keeps its library, and all ranks use rank 0's."""

    def resolve() -> tuple[str, str] | None:
        matmul_library.check_library(config.performance.cpu_matmul)
        if distributed.rank != 0:
            return None
        return library_of_products(config, {} if choice.newest is None else choice.newest[1].config)

    if distributed.device.type != "cpu":
        return config, ()
    name, reason = distributed.broadcast_object(together(distributed, resolve))
    matmul_library.use_library(name)
    notes = (Note(f"--cpu_matmul=auto is {name}: {reason}"),) if reason else ()
    return dataclasses.replace(config, performance=dataclasses.replace(config.performance, cpu_matmul=name)), notes


def _open_inputs(start: Start, variables: Mapping[str, str], kernels: Kernels) -> Inputs:
    """Open everything that needs no communication."""
    config, distributed = start.config, start.distributed
    if distributed.rank == 0:
        check_trackers(config)
    script = config.training.export_callback_script if distributed.rank == 0 else ""
    callback = open_callback(script, environment_with(variables), variables)
    data = open_data(config, distributed.data.rank, distributed.data.world_size)
    data.while_waiting = distributed.check_step
    return Inputs(data, kernels, model_layers(config, kernels, distributed.tensor), callback)


def _log_banner(start: Start, inputs: Inputs, notes: Sequence[Note]) -> None:
    config, distributed, logger = start.config, start.distributed, start.logger
    derived = derived_numbers(config, inputs.layers, distributed, inputs.data.describe())
    _tell(start, banner(config, derived), short_banner(config, derived))
    for line, short in choice_lines(config, inputs.kernels, inputs.layers, distributed.device):
        _tell(start, line, short)
    for note in notes:
        logger.log(logging.WARNING if note.is_warning else logging.INFO, note.text)
    found = (*warnings(config), *placement_warnings(config, distributed), *device_warnings(config, distributed.device))
    for warning in (*found, *inputs.kernels.warnings, *inputs.data.warnings):
        logger.warning(warning)


def _tell(start: Start, full: str, short: str) -> None:
    """Log the full text to the log file and the short one to the console, unless --show_all_options=1."""
    log_both(start.logger, console=full if start.config.run.show_all_options else short, file=full)


# -- allocate -----------------------------------------------------------------------------------------------------


def _allocate(start: Start, layers: list[Layer]) -> MultiStage:
    config = start.config
    return MultiStage(
        layers,
        config.multi_stage,
        config.batch,
        config.distributed.training_dtype,
        start.distributed.data,
        tensor=start.distributed.tensor,
        world=start.distributed,
        training=not config.training.inference,
        state=rule_of(config.optimizer).declared,
        averaged=config.averaging.enabled,
    )


def _time_collectives(start: Start, model: MultiStage) -> dict[str, float]:
    """With --log_communication, time waits from now on, and time each collective without overlap."""
    distributed = start.distributed
    if not start.config.run.log_communication:
        return {}
    distributed.traffic.timed = True
    with distributed.traffic.paused():
        return time_collectives(model.stages, model.group, distributed.barrier)


def _open_profiles(start: Start, model: MultiStage) -> Profiles | None:
    options = start.config.profiling
    if not (options.profile_cpu or options.profile_cuda or options.profile_schedule):
        return None
    from megatron_lite.monitor.profiling.profiles import open_profiles

    return open_profiles(start.config, start.logger, start.distributed, start.experiment.profiles, model)


# -- fill ---------------------------------------------------------------------------------------------------------


def _fill(
    start: Start,
    choice: Choice,
    source: WeightSource | None,
    model: MultiStage,
    optimizer: Optimizer,
    window: LogWindow,
    data: dict[str, Any],
) -> Resumed:
    """Load the newest good checkpoint or the pretrained weights, or else initialize the weights."""
    config, root = start.config, start.experiment.checkpoints
    ranks, logger, check = start.distributed, start.logger, start.experiment.check
    resumed = resume(choice, root, config, model, optimizer, window.load_state, data, ranks, logger, check)
    if resumed is not None:
        return resumed
    iteration = 0
    if source is None:
        model.initialize(config.distributed.seed)
    else:
        iteration = _load_pretrained(start, source, model, optimizer)
    optimizer.averaging.start()
    return Resumed(iteration)


def _load_pretrained(start: Start, source: WeightSource, model: MultiStage, optimizer: Optimizer) -> int:
    """Load pretrained weights, with optimizer state if requested; return the number of completed iterations.

    Without `step` in --load_parts, iterations, schedule and data start over.
    """
    config, logger = start.config, start.logger
    with source:
        missing, line = load_pretrained.partly(source, model)
        if missing:
            model.initialize(config.distributed.seed)
        load_pretrained.load_weights(source, model, start.distributed, missing)
        if line is not None:
            logger.warning(line)
        logger.info("loaded the weights of %s (%s)", source.folder, source.description)
        if config.source.load_pretrained_optimizer and model.training:
            name = config.optimizer.optimizer
            state, note = load_pretrained.load_moments(source, model, start.distributed, name)
            optimizer.load_rule(state)
            logger.info("  with the state of its optimizer, after %s updates", f"{state['updates']:,}")
            if note is not None:
                logger.warning(note)
        if "step" not in config.source.load_parts or source.iteration is None:
            return 0
        logger.info("  the run continues after its iteration %d", source.iteration)
        return source.iteration


def _debug(start: Start, model: MultiStage) -> TensorDebugger | None:
    """Log the initial (or loaded) weights and observe the stages, if a debug option is set."""
    debugger = open_debugger(start.config, start.logger, start.distributed, start.experiment.artifacts)
    if debugger is not None:
        debugger.attach(model)
        with debugger.phase("init"):
            debugger.parameters(model, "init")
    return debugger
