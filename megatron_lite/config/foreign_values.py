"""Flags of Fast-LLM's flat-flag era that are no options here, with the values that are accepted and why no others.

Nothing is accepted that would be ignored: a flag is accepted with exactly those values that describe what this program
does anyway (`--tensor_parallel=1`), so that existing command lines keep working. Other programs' flags: `instead.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Refused:
    """One flag of Fast-LLM that is no option here."""

    name: str
    default: str  # Fast-LLM's, as one would type it
    accepted: tuple[str, ...]  # the values under which Fast-LLM would do what this program does
    reason: str
    switch: bool = False  # bare means 1, and true and false are understood
    aliases: tuple[str, ...] = ()  # Megatron-LM's name for it

    def accepts(self, value: str) -> bool:
        """Whether `value`, as typed, is one of `accepted`: 1, 1.0 and true are the same."""
        return _plain(value) in {_plain(accepted) for accepted in self.accepted}


def _plain(value: str) -> str:
    value = {"true": "1", "false": "0", "": "none", "[]": "none", "{}": "none"}.get(value.lower(), value.lower())
    whole, _, fraction = value.partition(".")
    return whole if whole.isascii() and whole.isdigit() and not fraction.strip("0") else value


def _switch(name: str, default: str, accepted: str, reason: str, *aliases: str) -> Refused:
    return Refused(name, default, tuple(accepted.split()), reason, True, aliases)


def _value(name: str, default: str, accepted: str, reason: str, *aliases: str) -> Refused:
    return Refused(name, default, tuple(accepted.split()), reason, False, aliases)


_OVERLAP = (
    "gathers and reduces run beside the computation; for none of that write --num_weight_buffers=1 --num_grad_buffers=1"
)
PARALLEL = "only data parallelism for now"
_SEED = "every random number derives from the seed and its own place (weight, sample, layer), not from shifted seeds"
_EXPERTS = "mixture of experts comes later"
_FIM = "fill-in-the-middle is not built"
_MODEL_TYPE = "the folder's config.json says which model it is"
_WHOLE_CONFIG = "of a pretrained folder only the architecture is taken; write everything else as flags"
PROFILE = "the profiler is not built yet"
_TRITON = "matrix products are the vendor's own; write --enable_triton_kernels=0 or =1 for everything else"
COMPILE = (
    "torch.compile is not used: the operations are autograd functions fused by hand, which it does not take whole, "
    "and one by one, compiled on a CPU, they take as long"
)
_CONVERT = "belongs to Fast-LLM's conversion tool; scripts/convert_checkpoint.py is ours"
TORCHRUN = "torchrun sets it through the environment: torchrun --nproc-per-node=N --nnodes=M"


_BATCH = (
    _value("micro_sequence_length", "none", "none", "a micro-batch holds whole samples of sequence_length tokens"),
)

_ENGINE = (
    _switch("compile_all", "0", "0", COMPILE),
    _value("tensor_parallel", "1", "1", PARALLEL, "tensor_model_parallel_size"),
    _value("pipeline_parallel", "1", "1", PARALLEL, "pipeline_model_parallel_size"),
    _switch("sequence_tensor_parallel", "0", "0", PARALLEL, "sequence_parallel"),
    _value("sequence_data_parallel", "1", "1", PARALLEL, "context_parallel_size"),
    _switch("pipeline_first", "0", "0", PARALLEL),
    *(_value(name, "from torchrun", "", TORCHRUN) for name in ("rank", "local_world_size")),
    _value("optimization_dtype", "float32", "float32 fp32 float", "master weights and moments are fp32"),
    _switch("reproducible_init", "0", "1", "initial weights never depend on the number of ranks"),
    *(
        _value(f"{name}_seed_shift", "a large prime", "", _SEED)
        for name in (
            "dp",
            "pp",
            "pp_gen_init",
            "pp_gen",
            "tp",
            "tp_gen_init",
            "tp_gen",
            "sample",
            "train",
            "valid",
            "test",
        )
    ),
    _switch("pipeline_overlap", "1", "1", PARALLEL),
    _switch("data_overlap", "1", "1", _OVERLAP),
    _switch("debug_schedule", "0", "0", "the schedule is not logged"),
    _switch("debug_send_recv", "0", "0", PARALLEL),
    _switch("profile_schedule", "0", "0", PROFILE),
    _switch("skip_step", "0", "0", "no part of a training step can be left out"),
)

_MODEL = (
    _switch("triton_rotary", "1", "1", "write --enable_triton_kernels=0, for all operations"),
    _value("normalization_implementation", "auto", "auto", "the implementation is chosen by the program"),
    _switch("transposed_mlp_weight", "1", "0", "every matrix is stored as (outputs, inputs)"),
    _switch("use_flash_attention", "1", "1", "write --attention_backend=math for the formula itself", "use_flash_attn"),
    _switch("parallel_embeddings", "1", "1", PARALLEL),
    _value("sequence_first", "none", "none", "the batch dimension always comes first"),
    _switch(
        "debug_transformer", "0", "0", "tensors within a layer are not logged; write --debug_layer_outputs=<level>"
    ),
    _switch(
        "debug_transformer_memory", "0", "0", "memory within a layer is not logged; write --debug_activation_memory=1"
    ),
)

_MIXTURE = (
    _value("num_experts", "1", "1", _EXPERTS),
    _value("num_shared_experts", "0", "0", _EXPERTS),
    _value("num_experts_per_token", "1", "1", _EXPERTS, "moe_router_topk"),
    _value("expert_routing_type", "topk", "topk", _EXPERTS),
    _switch("dropless_moe", "1", "1", _EXPERTS),
    _switch("dropless_dynamic_shape", "0", "0", _EXPERTS),
    _value("expert_auxiliary_loss_coefficient", "0.01", "0.01 0", _EXPERTS),
    _value("expert_z_loss_coefficient", "0", "0", _EXPERTS),
    _value("moe_jitter_eps", "0", "0", _EXPERTS),
    _value("mlp_lr_scale", "[]", "none 1", "write --lr_scales=<pattern of the weights' names>:<scale>"),
    _value("router_lr_scale", "none", "none 1", _EXPERTS),
)

_RUN = (
    _switch("structured_logs", "1", "1", "log lines have one format"),
    _switch("torch_dynamo_enable", "1", "0", COMPILE),
    _switch("triton_linear_kernels", "0", "0", _TRITON),
)

_FILL_IN_THE_MIDDLE = tuple(
    Refused(f"fim_{name}", default, (default,), _FIM, switch=name == "truncate_or_pad")
    for name, default in (
        ("rate", "0"),
        ("max_middle_len", "none"),
        ("split_sample", "none"),
        ("fragment_rate", "0"),
        ("ignore_prefix", "none"),
        ("spm_rate", "0.5"),
        ("truncate_or_pad", "0"),
    )
)

_OTHER_WEIGHTS = (
    _value("imported_model_type", "none", "none", _MODEL_TYPE),
    _switch("load_full_base_model_config", "0", "0", _WHOLE_CONFIG),
    _switch("load_full_fast_llm_config", "0", "0", _WHOLE_CONFIG),
)

_PROFILING = (
    *(_switch(f"profile_{name}", "0", "0", PROFILE) for name in ("cpu", "cuda", "averages", "trace", "log", "export")),
    *(
        _value(f"profile_{name}", default, default, PROFILE)
        for name, default in (("skip", "1"), ("wait", "0"), ("warmup", "1"), ("cycles", "1"), ("column_width", "80"))
    ),
    _value("profile_ranks", "[]", "none", PROFILE),
)

_CONVERSION = (
    *(
        _value(name, default, "", _CONVERT)
        for name, default in (
            ("input_type", "required"),
            ("output_type", "required"),
            ("input_path", "required"),
            ("output_path", "required"),
            ("model_type", "none"),
            ("target_params_per_file", "4294967296"),
            ("layers_per_step", "none"),
        )
    ),
    _switch("exist_ok", "0", "", _CONVERT),
    _switch("use_cpu", "0", "", _CONVERT + "; write --device=cpu to train on the CPU"),
    _value("dtype", "none", "", _CONVERT + "; write --training_dtype=bf16 to train in bf16"),
)

REFUSED: tuple[Refused, ...] = (
    *_BATCH,
    *_ENGINE,
    *_MODEL,
    *_MIXTURE,
    *_RUN,
    *_FILL_IN_THE_MIDDLE,
    *_OTHER_WEIGHTS,
    *_PROFILING,
    *_CONVERSION,
)

# Values that an option of `config/` has in Fast-LLM or that one may well try, with the reason why not.
REFUSED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("dataset_source", "file"): "a blend described by a JSON file comes later; "
        "write the weights and prefixes: --data_path 0.3 first 0.7 second",
        ("dataset_source", "sample"): "the sample data set does not exist; write random for made-up tokens",
        ("mlp_recompute_level", "offload"): "activations are not moved to the host's memory; write activation or full",
        ("mlp_recompute_level", "nested"): "write full, or --recompute_layers=<N> for whole blocks",
        ("mlp_recompute_level", "recompute"): "write activation or full, or --recompute_layers=<N> for whole blocks",
        **{
            ("lr_schedule", style): "this is a list of stages; for Levanter's lr_schedule write "
            f"--lr_decay_style={style}{'_tokens' if style == 'power' else ''}"
            for style in ("constant", "linear", "cosine", "inv_sqrt", "inv", "power")
        },
        ("clip_grad", "none"): "write 0, which turns clipping off",
        ("pretrained_checkpoint_type", "state_dict"): "pickles are never loaded; write the weights as safetensors",
        ("validation_iters", "none"): "write all for the whole validation set, 0 for no validation",
        ("weight_decay_default_mask", "true"): "write levanter",
        ("weight_decay_default_mask", "false"): "write off, or beside --weight_decay_modules leave it out",
        (
            "zero_stage",
            "0",
        ): "strictly worse: a full optimizer state on every rank costs more memory and a slower update; write 1",
    }
)

REFUSED_SPELLINGS: Mapping[str, Refused] = MappingProxyType(
    {spelling: refused for refused in REFUSED for spelling in (refused.name, *refused.aliases)}
)
