"""Set up everything that training needs, in three phases: open inputs, allocate, resume."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from megatron_lite.checkpoint.frozen_base import digest_of
from megatron_lite.checkpoint.history import History
from megatron_lite.checkpoint.mirror import Mirror
from megatron_lite.checkpoint.names import new_nonce
from megatron_lite.checkpoint.resume import Choice, Resumed, check_early, choose_together, resume
from megatron_lite.checkpoint.retention import lack_at_start
from megatron_lite.checkpoint.rotation import again
from megatron_lite.checkpoint.writing import open_host_copy, shards_bytes
from megatron_lite.cli.help import banners
from megatron_lite.config import Config, JsonObject, changed
from megatron_lite.corpus.from_text import resolve_data
from megatron_lite.corpus.prepared import RunTokenizer, run_tokenizer
from megatron_lite.corpus.run_length import with_length
from megatron_lite.data.fingerprint import check_same
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.agreement import rank_0_works, together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.generation.samples import open_samples
from megatron_lite.huggingface import adapter_folder, load_pretrained
from megatron_lite.huggingface.weight_source import WeightSource
from megatron_lite.kernels import matmul_library
from megatron_lite.kernels.choice import Kernels, agree_on_kernels
from megatron_lite.kernels.eight_bit import eight_bit_of
from megatron_lite.model.adapters import is_of_adapter
from megatron_lite.model.gpt import model_layers, shapes_of
from megatron_lite.model.layer import Layer
from megatron_lite.monitor import schedule_picture
from megatron_lite.monitor.banner import (
    choice_lines,
    derived_numbers,
    device_warnings,
    placement_warnings,
    stage_lines,
)
from megatron_lite.monitor.best_evaluation import BestEvaluation
from megatron_lite.monitor.communication import time_collectives
from megatron_lite.monitor.export_callback import open_callback
from megatron_lite.monitor.logging import log_both, start_logging
from megatron_lite.monitor.memory_history import open_history
from megatron_lite.monitor.metric_lines import ConsoleLines
from megatron_lite.monitor.metrics import LogWindow, StepTimer, known_peak_tflops
from megatron_lite.monitor.preflight import preflight
from megatron_lite.monitor.routing_replay import RoutingReplay, open_replay
from megatron_lite.monitor.tensor_debug import TensorDebugger, open_debugger
from megatron_lite.monitor.trackers.opening import check_trackers, open_trackers
from megatron_lite.monitor.watch import Watch
from megatron_lite.optimizer.optimizer import Optimizer, rule_of
from megatron_lite.optimizer.partition import partitioned
from megatron_lite.optimizer.rules import muon
from megatron_lite.outputs.huggingface_export import write_export
from megatron_lite.outputs.run import Run
from megatron_lite.planner.auto import check_memory, device_memory_bytes, resolve_auto
from megatron_lite.planner.plan import planned_durations
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.launch import environment_with
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.validation import warnings
from megatron_lite.validation.rules import Note

if TYPE_CHECKING:
    from megatron_lite.monitor.profiling.profiles import Profiles

T = TypeVar("T")


def build(
    config: Config,
    distributed: Distributed,
    experiment: Experiment,
    stop: StopSignal,
    notes: tuple[Note, ...],
    environment: Mapping[str, str] | None = None,
    asked: Config | None = None,
) -> Run:
    """Set up a run. Collective; an error on any rank is raised on all.

    notes: from the command line. environment: variables of --export_callback_env, which `config`
    does not contain. asked: `config` as typed.

    Raises:
        RunError: if the run cannot start; its class gives the reason.
    """
    run = Run(config, distributed, experiment, stop, asked or config)
    choice, began, tokenizer, found = _resolve(run)
    kernels = agree_on_kernels(run.config, distributed)
    layers = together(
        distributed, lambda: _open_inputs(run, environment or {}, kernels, began, tokenizer)
    )
    check_same(run.data.identity, distributed)
    run.samples = open_samples(run.config, distributed, experiment, stop)
    _log_banner(run, kernels, layers, (*found, *notes))
    run.memory_history = open_history(run.config, experiment.root, distributed, run.logger)
    together(
        distributed,
        lambda: (
            check_early(choice, run.config, run.data.identity) if distributed.rank == 0 else None
        ),
    )
    opened = [again(lambda: _sources(run, layers))]

    _allocate(run, layers, kernels)
    if run.config.distributed.preflight != "0":
        _preflight(run, next((iteration for iteration, _ in choice.found), 0))

    # If a live run deletes what is loaded, retry from its newest checkpoint by then.
    run.resumed = again(lambda: _fill(run, *(opened.pop() if opened else _sources(run, layers))))
    _go_on(run)
    _open_outputs(run, layers)
    return run


# -- open the inputs
# ----------------------------------------------------------------------------------------------


def _resolve(run: Run) -> tuple[Choice, JsonObject | None, RunTokenizer, tuple[Note, ...]]:
    """Open the log, resolve `auto` and text data in the configuration, and choose the checkpoints
    to resume from.

    Also returns the newest checkpoint's data, see `open_data`, the tokenizer, and notes.
    """
    config = run.config
    distributed = run.distributed
    experiment = run.experiment
    rank = distributed.rank
    run.logger = start_logging(experiment.log_file(rank), to_console=rank == 0)
    config, sizes = _resolve_auto(config, distributed)
    if (root := experiment.root) is not None and (options := config.checkpoint).mirror is not None:
        distributed.progress.enter("the comparison with the mirror")
        arguments = (root, options, run.stop.fail, config.distributed.startup_timeout)
        run.mirror = together(distributed, lambda: Mirror(*arguments) if rank == 0 else None)
    _on_mirror(run, Mirror.compare)
    distributed.progress.enter("the choice of a checkpoint")
    choice = _choose(run)
    began = distributed.broadcast_object(choice.began)
    distributed.progress.enter("the preparation of the data")
    config, run.pinned = resolve_data(config, distributed, experiment.root, run.logger, began)
    tokenizer = together(distributed, lambda: run_tokenizer(config))
    config = changed(config, {"tokenizer_file": tokenizer.file})
    config = _choose_products(config, distributed)
    run.config, length = together(
        distributed, lambda: with_length(config, run.asked, began, distributed.world_size)
    )
    return choice, began, tokenizer, (*sizes, *length)


def _choose(run: Run) -> Choice:
    """Choose the checkpoints to resume from."""
    usable = {} if run.mirror is None else run.mirror.usable
    return choose_together(
        run.experiment.checkpoints, run.config.checkpoint, run.distributed, usable
    )


def _on_mirror(run: Run, action: Callable[[Mirror], T]) -> T | None:
    """Run an action on the mirror on rank 0 while the others wait; return the result, None without
    --mirror."""
    if run.config.checkpoint.mirror is None:
        return None
    mirror = run.mirror
    return rank_0_works(run.distributed, lambda: None if mirror is None else action(mirror))


def _resolve_auto(config: Config, distributed: Distributed) -> tuple[Config, tuple[Note, ...]]:
    """Replace `auto` by values that fit the smallest device, equal on all ranks."""
    memory_bytes = device_memory_bytes(distributed.device, distributed.local_world_size)
    smallest, device_type = -distributed.agree_max(-memory_bytes), distributed.device.type
    ranks, nodes = distributed.world_size, distributed.nodes
    return together(distributed, lambda: resolve_auto(config, ranks, device_type, smallest, nodes))


def _choose_products(config: Config, distributed: Distributed) -> Config:
    """Resolve and apply --cpu_matmul: `auto` is oneDNN only if every rank's processor would choose
    it."""
    if distributed.device.type != "cpu":
        return config
    name = together(distributed, lambda: matmul_library.library_for(config.performance.cpu_matmul))
    name = "blas" if distributed.agree_max(name == "blas") else name
    matmul_library.use_library(name)
    return changed(config, {"cpu_matmul": name})


def _open_inputs(
    run: Run,
    variables: Mapping[str, str],
    kernels: Kernels,
    began: JsonObject | None,
    tokenizer: RunTokenizer,
) -> list[Layer]:
    """Open everything that needs no communication; return the layers to train. began: see
    `open_data`."""
    config, distributed = run.config, run.distributed
    script = ""
    if distributed.rank == 0:
        check_trackers(config)
        script = config.training.export_callback_script
    run.callback = open_callback(script, environment_with(variables), variables)
    run.data = open_data(config, distributed.samples.rank, distributed.samples.world_size, began)
    run.data.while_waiting = distributed.check_step
    metric, _, name = (config.checkpoint.keep_best or "").partition("/")
    if name and name not in (names := run.data.alone("validation")):
        raise UsageError(
            f"--keep_best={metric}/{name}: write {metric}, or after / one of {', '.join(names) or 'none'}"
        )
    run.data.identity |= tokenizer.identity
    run.data.warnings = (*run.data.warnings, *tokenizer.warnings)
    if tokenizer.unknown and distributed.rank == 0:
        run.data.search_in_background(tokenizer.unknown, run.stop.fail)
    return model_layers(config, kernels, distributed)


def _log_banner(run: Run, kernels: Kernels, layers: list[Layer], notes: Sequence[Note]) -> None:
    config = run.config
    distributed = run.distributed
    logger = run.logger
    derived = derived_numbers(
        config, layers, distributed, run.data.description, run.data.counts.schedule
    )
    log_both(logger, console="", file=f"command: {shlex.join(sys.argv)}")
    every, typed = banners(run.shown_config, derived)
    log_both(logger, console=typed, file=every)
    for line, short in choice_lines(config, kernels, layers, distributed.device):
        log_both(logger, console=short, file=line)
    for note in notes:
        logger.log(logging.WARNING if note.is_warning else logging.INFO, note.text)
    found = (
        *warnings(config),
        *placement_warnings(config, distributed),
        *device_warnings(config, distributed.device),
    )
    for warning in (*found, *kernels.warnings, *run.data.warnings):
        logger.warning(warning)


# -- allocate
# -----------------------------------------------------------------------------------------------------


def _allocate(run: Run, layers: list[Layer], kernels: Kernels) -> None:
    """Create the model and its optimizer, which take most of the memory, and their monitors."""
    config, distributed = run.config, run.distributed
    together(distributed, lambda: check_memory(config, layers, distributed))
    distributed.progress.enter("the loading")
    planned = config, distributed.world_size, distributed.device.type
    trains = not config.training.inference
    run.model = together(
        distributed,
        lambda: partitioned(config, layers, distributed, trains, planned_durations(*planned)),
    )
    together(distributed, run.model.memory.register)
    for line, short in stage_lines(run.model, config.batch):
        log_both(run.logger, console=short, file=line)
    if config.run.debug_schedule and distributed.rank == 0:
        schedule_picture.draw(run.model.order, config.batch, run.logger, run.experiment.artifacts)
    if rule_of(config.optimizer).declared.whole_matrices and run.model.training:
        run.logger.info(muon.describe(run.model.all_stages))
    run.collectives_alone_s = _time_collectives(run)
    run.profiles = _open_profiles(run)
    run.optimizer = Optimizer(config, run.model.all_stages, distributed, kernels)
    run.window = LogWindow(distributed.device)


def _preflight(run: Run, done: int) -> None:
    """Check all machines and links. done: iterations of earlier starts."""
    num_bytes = shards_bytes(run.model, run.distributed.layers.world_size)
    lack = lack_at_start(run.experiment.checkpoints, num_bytes, run.config, done)
    preflight(run.distributed, run.model.precision.training, run.experiment.artifacts, lack)


def _time_collectives(run: Run) -> dict[str, float]:
    """Start timing waits for --log_communication, and time each collective without overlap."""
    distributed = run.distributed
    if not run.config.run.log_communication:
        return {}
    distributed.traffic.timed = True
    with distributed.traffic.paused():
        return time_collectives(run.model.stages, run.model.group, distributed.barrier)


def _open_profiles(run: Run) -> Profiles | None:
    options = run.config.profiling
    if not (options.profile_cpu or options.profile_cuda or options.profile_schedule):
        return None
    from megatron_lite.monitor.profiling.profiles import open_profiles

    return open_profiles(
        run.config, run.logger, run.distributed, run.experiment.profiles, run.model
    )


# -- fill
# ---------------------------------------------------------------------------------------------------------


def _sources(run: Run, layers: list[Layer]) -> tuple[Choice, WeightSource | None]:
    """Choose the checkpoints to resume from; if there are none, open the pretrained weights, if
    any."""
    options, choice = run.config.source, _choose(run)
    resumes = choice.found and not run.config.adapters.lora_rank
    if options.pretrained_checkpoint_path is None or "model" not in options.load_parts or resumes:
        return choice, None
    shapes = {name: shape for name, shape in shapes_of(layers).items() if not is_of_adapter(name)}
    return choice, load_pretrained.open_pretrained(
        run.config, shapes, run.distributed, run.logger.warning
    )


def _fill(run: Run, choice: Choice, source: WeightSource | None) -> Resumed:
    """Load the newest good checkpoint or the pretrained weights, otherwise initialize the
    weights.

    With adapters, first the model that they adapt, which no checkpoint contains.
    """
    model = run.model
    optimizer = run.optimizer
    data = run.data.identity
    root, load_window = run.experiment.checkpoints, run.window.load_state

    def leave(iteration: int) -> None:
        run.experiment.check()
        # first: a checkpoint that exists only there would be restored by the next start
        if run.mirror is not None:
            run.mirror.set_aside(iteration)

    def repair(iteration: int) -> bool | None:
        return _on_mirror(run, lambda mirror: mirror.fetch(iteration))

    adapters = run.config.adapters
    if adapters.lora_rank:
        load_pretrained.fill_base(source, run.config, model, run.distributed)
        run.base = digest_of(model, run.distributed)
    arguments = (
        choice,
        root,
        run.config,
        model,
        optimizer,
        load_window,
        data,
        run.distributed,
        run.logger,
    )
    resumed = resume(*arguments, leave, repair, run.base)
    if resumed is not None:
        return resumed
    iteration = 0
    if adapters.lora_rank:
        if adapters.pretrained_adapter is not None:
            adapter_folder.load(run.config, model, run.distributed)
    elif source is None:
        model.initialize(run.config.distributed.seed)
    else:
        iteration = load_pretrained.start_from(
            source, run.config, model, optimizer, run.distributed, run.logger
        )
    optimizer.averaging.start()
    return Resumed(iteration, source.origin if source else {}, {"stages": [(0, 0, 0)], "sets": ()})


def _go_on(run: Run) -> None:
    """Continue the run where it stopped: its iteration, counts, history and best evaluation."""
    config = run.config
    distributed = run.distributed
    checkpoints = run.experiment.checkpoints
    run.iteration, run.evaluation_due = run.resumed.iteration, run.resumed.evaluation_due
    run.data.counts.begin(run.resumed.counts, run.iteration)
    begun = History(distributed.broadcast_object(new_nonce()), ())
    run.history = (run.resumed.history or begun).continued(run.iteration, config)
    run.best = BestEvaluation(config, run.data.identity, run.resumed.best)
    run.best.warn(checkpoints, run.logger)
    run.debugger = _debug(run)
    with distributed.traffic.paused():
        run.model.gather_ahead()  # every iteration ends with this
    num_bytes = shards_bytes(run.model, distributed.layers.world_size)
    if distributed.rank == 0 and (
        lack := lack_at_start(checkpoints, num_bytes, config, run.iteration)
    ):
        run.logger.warning(lack)


def _debug(run: Run) -> TensorDebugger | None:
    """Log the initial (or loaded) weights and observe the stages, if a debug option is set."""
    debugger = open_debugger(run.config, run.logger, run.distributed, run.experiment.artifacts)
    if debugger is not None:
        debugger.attach(run.model)
        with debugger.phase("init"):
            debugger.parameters(run.model, "init")
    return debugger


# -- open the outputs
# ---------------------------------------------------------------------------------------------


def _open_outputs(run: Run, layers: list[Layer]) -> None:
    config = run.config
    distributed = run.distributed
    experiment = run.experiment
    run.write_export = partial(write_export, run)
    run.host_copy = open_host_copy(config, run.model, distributed)
    arguments = (
        run.shown_config,
        experiment.root,
        experiment.run,
        distributed.rank == 0,
        run.iteration,
    )
    run.trackers = together(distributed, lambda: open_trackers(*arguments))
    peak_tflops = config.run.peak_tflops
    if peak_tflops is None and distributed.device.type == "cuda":
        peak_tflops = known_peak_tflops(torch.cuda.get_device_name(distributed.device))
    eight_bit_flops = sum(eight_bit.flops_per_token for eight_bit in eight_bit_of(layers))
    run.timer = StepTimer(
        config, distributed.world_size, run.iteration, peak_tflops, eight_bit_flops
    )
    run.console = ConsoleLines(distributed.device.type)
    if config.tracking.watch and run.model.training:
        watched = run.model, run.optimizer.loss_scale.scale, run.optimizer.router_sums
        run.watch = Watch(config, *watched, distributed, run.trackers.log)
    if config.run.moe_replay_routing is not None:
        samples = run.data.counts.schedule.consumed_samples(config.training.train_iters)
        reads = rank_0_works(distributed, lambda: open_replay(config, samples))
        run.replay = RoutingReplay(config, reads)
    if run.mirror is not None:
        run.mirror.begin(run.history.run)
        run.mirror.update()
    run.saved_s = time.monotonic()
