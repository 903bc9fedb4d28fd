"""Adapters in the format of peft (https://github.com/huggingface/peft): `adapter_config.json` and
`adapter_model.safetensors`.

A tensor's key is `base_model.model.<their module>.lora_A.weight` (r, i) or `.lora_B.weight` (o, r),
in fp32. No tensor states rank, alpha or scaling, and peft ignores missing keys, so a folder is only
read if all of its keys are used and lora_alpha is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.files import TensorToWrite
from megatron_lite.checkpoint.names import has_only_our_files, new_nonce, work_path
from megatron_lite.config import Config, JsonObject, ModelConfig, Options
from megatron_lite.config.adapters import AdapterConfig
from megatron_lite.distributed.agreement import together, write_together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError, shorten
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.export import Weights, master_weights
from megatron_lite.huggingface.model_folder import ADAPTER_NAME as CONFIG_NAME
from megatron_lite.huggingface.model_folder import read_object
from megatron_lite.huggingface.weight_map import MappedRows, pieces
from megatron_lite.model.adapters import (
    LinearMap,
    adapters_of,
    add_products,
    factors,
    is_of_adapter,
    maps_of,
)
from megatron_lite.model.gpt import build_gpt, linear_layers
from megatron_lite.model.parameter_patterns import by_block
from megatron_lite.run.regular_files import open_regular
from megatron_lite.zero.multi_stage import MultiStage

WEIGHTS_NAME = "adapter_model.safetensors"
FLAG = "--pretrained_adapter"
# Keys of adapter_config.json that must be absent or empty: with them the adapter is another
# function.
UNSUPPORTED = (
    "modules_to_save rank_pattern alpha_pattern use_dora use_qalora lora_bias "
    "trainable_token_indices layer_replication alora_invocation_tokens use_bdlora arrow_config "
    "kasa_config monteclora_config"
)
# With other ways to begin, peft first takes something away from the model, again at each load.
PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
LARGEST = 2**20  # of rank and alpha, far above any use


class AdaptedModule(NamedTuple):
    """A linear map and the module of theirs that computes it, or the parameter, of all experts."""

    map: LinearMap
    module: str  # model.layers.0.self_attn.q_proj
    rows: tuple[MappedRows, ...]  # of the weight, and so of B
    owner: str  # in keys

    def keys(self) -> tuple[str, str]:
        """Return the names of A and B."""
        a, b = (f"base_model.model.{self.owner}.lora_{letter}.weight" for letter in "AB")
        return a, b

    def stacked(self, b: Tensor) -> Tensor:
        """Return B's, (E o, r), in their order, (o, r E): the expert is the innermost index."""
        experts = self.map.experts
        return b.view(experts, -1, b.shape[1]).permute(1, 2, 0).reshape(-1, b.shape[1] * experts)

    def unstacked(self, b: Tensor) -> Tensor:
        """Return the reverse of `stacked`."""
        return b.view(len(b), -1, self.map.experts).permute(2, 0, 1).reshape(self.map.rows, -1)

    def padded(self, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return their A and B with zeros for what they lack of a rank."""
        of_experts = a.view(self.map.experts, -1, a.shape[1]), b.view(len(b), -1, self.map.experts)
        zeros = (0, 0, 0, max(0, rank - of_experts[0].shape[1]))
        wide_a, wide_b = (functional.pad(each, zeros) for each in of_experts)
        return wide_a.flatten(0, 1), wide_b.flatten(1)

    def pairs(self, ours: Tensor, theirs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same rows of B in our tensor, which begins with the map's, and in theirs."""
        for piece in self.rows:
            start = piece.first_row - self.map.first
            rows = ours[start : start + piece.rows]
            yield rows, piece.place(theirs, rows)


def modules_of(
    maps: Sequence[LinearMap],
    shapes: Mapping[str, tuple[int, ...]],
    architecture: str,
    model: ModelConfig,
) -> list[AdaptedModule]:
    """Return the modules of theirs for linear maps. shapes: of our parameters by name."""
    found = []
    for each in maps:
        name, end = f"{each.weight}.weight", each.first + each.rows
        rows = tuple(
            piece._replace(
                transposed=False,
                their_first_row=piece.their_first_row + piece.matrix * each.rows // each.experts,
            )
            for piece in pieces(name, shapes[name], architecture, model, in_memory=True)
            if each.first <= piece.first_row < end
        )
        (theirs,) = {piece.name for piece in rows}
        module = theirs.removesuffix(".weight")
        owner = module.rpartition(".")[0] if each.experts > 1 else module
        found.append(AdaptedModule(each, module, rows, owner))
    # peft wraps the experts' module for each parameter, down_proj last
    outer = {
        each.owner for each in found if each.map.experts > 1 and each.module.endswith("down_proj")
    }
    return [
        each._replace(owner=f"{each.owner}.base_layer")
        if each.owner in outer and each.module.endswith("gate_up_proj")
        else each
        for each in found
    ]


def _of_model(model: MultiStage, config: Config) -> list[AdaptedModule]:
    shapes = {spec.name: spec.shape for spec in model.specs()}
    architecture = check_exportable(config.model, config.training.export_model_type)
    return modules_of(_maps(model), shapes, architecture, config.model)


def _maps(model: MultiStage) -> list[LinearMap]:
    layers = [layer for stage in model.all_stages for layer in stage.layers]
    return [each for adapter in adapters_of(layers) for each in adapter.maps]


# -- export
# ----------------------------------------------------------------------------------------------


def save(
    directory: Path,
    model: MultiStage,
    config: Config,
    base: JsonObject,
    distributed: Distributed,
    check: Callable[[], None],
) -> None:
    """Write a folder for peft, replacing an older one of the same name. Collective.

    base: keys of `adapter_config.json` that name the frozen model. check: see `writing.Save`.

    Raises:
        StorageError: on every rank, if the folder cannot be written.
    """
    averaged = config.training.export_weights == "average"
    values = {
        name: tensor.clone()
        for name, tensor in master_weights(model, distributed, averaged, trained_only=True)
    }
    temporary = work_path(directory, "tmp", distributed.broadcast_object(new_nonce()))

    def write() -> None:
        if distributed.rank != 0:
            return
        check()
        directory.parent.mkdir(parents=True, exist_ok=True)
        files.recover(directory.parent)
        temporary.mkdir()
        modules = _of_model(model, config)
        tensors = dict(_theirs(modules, values, config.adapters))
        listed = [
            TensorToWrite(key, torch.float32, tuple(value.shape), partial(tensors.__getitem__, key))
            for key, value in sorted(tensors.items())
        ]
        files.write_tensors(
            temporary / WEIGHTS_NAME, listed, {"format": "pt"}, lambda num_bytes: None
        )
        text = json.dumps(base | _config_of(modules, config), indent=2)
        files.write_text(temporary / CONFIG_NAME, f"{text}\n")
        check()
        files.publish(temporary, directory, has_only_our_files)

    try:
        write_together(distributed, f"the export {directory}", directory.parent, write)
    except BaseException:
        if distributed.rank == 0:
            files.remove_folder(temporary)
        raise


def _theirs(
    modules: Sequence[AdaptedModule], values: Mapping[str, Tensor], options: AdapterConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors by key, given ours by name."""
    maps = [each.map for each in modules]
    for each, (a, b) in zip(modules, factors(maps, values, options.lora_rank), strict=True):
        of_b = torch.empty_like(b)
        for ours, theirs in each.pairs(b, of_b):
            theirs.copy_(ours)
        yield from zip(each.keys(), (a, each.stacked(of_b)), strict=True)


def _config_of(modules: Sequence[AdaptedModule], config: Config) -> dict[str, object]:
    options = config.adapters
    architecture = check_exportable(config.model, config.training.export_model_type)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.lora_rank,
        "lora_alpha": options.lora_alpha or options.lora_rank,
        "use_rslora": options.lora_scaling == "sqrt_rank",
        "lora_dropout": options.lora_dropout,
        "target_modules": [each.module for each in modules if each.map.experts == 1],
        "target_parameters": [each.module for each in modules if each.map.experts > 1] or None,
        "fan_in_fan_out": architecture == "gpt2",
        "bias": "none",
        "inference_mode": True,
    }


def merged_weights(model: MultiStage, config: Config, distributed: Distributed) -> Weights:
    """Yield (name, full fp32 weight plus its adapters' product) like `export.master_weights`, to be
    rounded once."""
    averaged = config.training.export_weights == "average"
    maps = _maps(model)
    held: dict[str, Tensor] = {}  # of the adapters of one stage, which come before its weights
    for name, values in master_weights(model, distributed, averaged):
        if is_of_adapter(name):
            held[name] = values.clone()
            continue
        if distributed.rank == 0:
            add_products(name, values, maps, held, config.adapters)
        yield name, values


# -- import
# ----------------------------------------------------------------------------------------------


def load(config: Config, model: MultiStage, distributed: Distributed) -> None:
    """Fill the adapters from the folder of --pretrained_adapter. Collective.

    Raises:
        CheckpointError: on every rank, see `read`.
    """
    assert config.adapters.pretrained_adapter is not None
    folder, values = Path(config.adapters.pretrained_adapter), dict[str, Tensor]()

    def read_here() -> None:
        shapes = {spec.name: spec.shape for spec in model.specs()}
        try:
            values.update(read(folder, config, _maps(model), shapes))
        except CheckpointError as error:
            fix = "leave --lora_targets and --lora_rank out, or give another folder"
            raise CheckpointError(f"{FLAG}={error}; {fix}") from None

    together(distributed, read_here)
    for _, part in model.parts():
        if not part.frozen:
            shard = part.read("weights")
            for spec, tile in part.layout.tiles(part.rank):
                own = shard[tile.offset : tile.end].view(tile.rows, tile.width)
                own.copy_(tile.view(values[spec.name].view(-1)))
            part.write("weights", shard)
    model.invalidate()
    files.logger.info("loaded the adapters of %s", folder)


def read(
    folder: Path, config: Config, maps: Sequence[LinearMap], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return A and B by our names, in fp32. maps: those with adapters. shapes: of our parameters.

    Raises:
        CheckpointError: if a key is missing, left over or of another shape.
    """
    values = {name: torch.empty(shape) for name, shape in shapes.items() if is_of_adapter(name)}
    architecture = check_exportable(config.model, config.training.export_model_type)
    modules = modules_of(maps, shapes, architecture, config.model)
    rank = config.adapters.lora_rank
    with _opened(folder) as opened:
        tensors = {key: opened.get_tensor(key).float() for key in opened.keys()}
    known, is_padded = (shapes, architecture, config.model), False
    for each in modules:
        if parts := _by_expert(each, *known, {*tensors}):
            is_padded = True
            try:
                tensors |= zip(each.keys(), _together(each, parts, tensors), strict=True)
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"{folder}: {each.module}: the adapters of single experts are not alike ({error})"
                ) from None
    found, wanted = set(tensors), {key for each in modules for key in each.keys()}
    problems = [f"no {key}" for key in sorted(wanted - found)]
    problems += [f"{key} is not used" for key in sorted(found - wanted)]
    problems += [
        f"{key} is not finite" for key, each in tensors.items() if not each.isfinite().all()
    ]
    ours = list(factors(maps, values, rank))
    for each, (a, b) in () if problems else zip(modules, ours, strict=True):
        theirs = [tensors[key] for key in each.keys()]
        if is_padded:
            theirs = [*each.padded(theirs[0], theirs[1], rank)]
        has, fitting = ([[*one.shape] for one in some] for some in (theirs, (a, each.stacked(b))))
        if has != fitting:
            problems.append(
                f"{each.module} has {has[0]} and {has[1]}, not {fitting[0]} and {fitting[1]}"
            )
            continue
        a.copy_(theirs[0])
        for own, rows in each.pairs(b, each.unstacked(theirs[1])):
            own.copy_(rows)
    if problems:
        raise CheckpointError(f"{folder}: {shorten(problems)}")
    return values


def _by_expert(
    each: AdaptedModule,
    shapes: Mapping[str, tuple[int, ...]],
    architecture: str,
    model: ModelConfig,
    found: Collection[str],
) -> list[tuple[str, MappedRows]]:
    """Return the adapters of single experts, if there are keys of some: the begin of their keys,
    and their rows."""
    name = f"{each.map.weight}.weight"
    parts = [
        (f"base_model.model.{piece.name.removesuffix('.weight')}.lora_", piece)
        for piece in pieces(name, shapes[name], architecture, model)
    ]
    return parts if each.map.experts > 1 and f"{parts[0][0]}A.weight" in found else []


def _together(
    each: AdaptedModule, parts: Sequence[tuple[str, MappedRows]], tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return one A and one B for all experts, as peft does: an expert's gate and up lie one after
    the other along the rank, and B is zero where it would mix them."""
    a = torch.cat([tensors.pop(f"{key}A.weight") for key, _ in parts])
    rank, count = len(a) // len(parts), len(parts) // each.map.experts
    b = a.new_zeros(each.map.rows, count * rank)
    for number, (key, piece) in enumerate(parts):
        columns = slice(number % count * rank, (number % count + 1) * rank)
        b[piece.first_row : piece.first_row + piece.rows, columns] = tensors.pop(f"{key}B.weight")
    return a, each.stacked(b)


def options_of(folder: Path, model: ModelConfig, model_type: str | None) -> Options:
    """Return the options that a folder states: rank, alpha, scaling and targets. model: resolved.

    Raises:
        CheckpointError: if peft would compute something else with it.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"{folder}: there is no {CONFIG_NAME}; give a folder that directly holds it, such as "
            "<experiment_dir>/export/<iteration>"
        )
    stated = read_object(folder, CONFIG_NAME)
    lacking = [key for key in ("r", "lora_alpha") if key not in stated]
    if stated.get("peft_type") != "LORA" or lacking:
        raise CheckpointError(
            f"{folder}: {CONFIG_NAME} is not of LoRA, or lacks {' and '.join(lacking) or 'its type'}"
        )
    wrong = [key for key in UNSUPPORTED.split() if stated.get(key)]
    if stated.get("bias", "none") != "none":
        wrong.append("bias")
    if stated.get("init_lora_weights") not in PLAIN_BEGINNINGS:
        wrong.append("init_lora_weights")
    if type(stated.get("target_parameters") or []) is not list:
        wrong.append("target_parameters")
    if wrong:
        raise CheckpointError(
            f"{folder}: {CONFIG_NAME} has {wrong[0]}={stated[wrong[0]]!r}, which is not supported"
        )
    rank, alpha = stated["r"], stated["lora_alpha"]
    are_numbers = type(rank) is int and type(alpha) in (int, float)
    if not are_numbers or not (0 < rank <= LARGEST and 0 < alpha <= LARGEST):
        raise CheckpointError(
            f"{folder}: {CONFIG_NAME} has r={rank!r} and lora_alpha={alpha!r}; write an integer and a "
            f"number, both above 0 and at most {LARGEST:,}"
        )
    weights = [layer.weight.spec for layer in linear_layers(build_gpt(model, 1))]
    maps = [each for spec in weights for each in maps_of(spec, model, model_type)]
    architecture = check_exportable(model, model_type)
    known = {spec.name: spec.shape for spec in weights}, architecture, model
    with _opened(folder) as opened:
        found = set(opened.keys())
    parameters = tuple(f".{name}" for name in stated.get("target_parameters") or ())
    names, times = list[str](), 1  # an expert's gate and up become one adapter of twice the rank
    for each in modules_of(maps, *known):
        parts = _by_expert(each, *known, found)
        times = max(times, len(parts) // each.map.experts)
        is_there = bool(parts) or not found.isdisjoint(each.keys())
        if each.map.experts > 1 and not parts:  # keys do not tell of which parameter they are
            is_there = f".{each.module}".endswith(parameters)
        names += [each.map.name] * is_there
    if times > 1 and stated.get("use_rslora"):
        raise CheckpointError(
            f"{folder}: {CONFIG_NAME} has use_rslora=True and adapters of single experts, whose factor in peft depends "
            "on the version of transformers"
        )
    groups = by_block(names)
    targets = [
        name
        for group, blocks in groups.items()
        for name in (
            [group]
            if len(blocks) == model.num_layers
            else [group.replace("*", str(block), 1) for block in blocks]
        )
    ]
    return {
        "lora_rank": rank * times,
        "lora_alpha": float(alpha) * times,
        "lora_scaling": "sqrt_rank" if stated.get("use_rslora") else "rank",
        "lora_targets": () if len(names) == len(maps) else tuple(targets),
    }


def _opened(folder: Path) -> safe_open:
    try:
        # the library would wait for a pipe
        open_regular(folder / WEIGHTS_NAME, follow_links=True).close()
        return safe_open(str(folder / WEIGHTS_NAME), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: {WEIGHTS_NAME} cannot be read ({error}); download the folder again"
        ) from None
