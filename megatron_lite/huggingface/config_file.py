"""Read and write config.json of a Hugging Face model, by the table in `architectures`. Imports no
torch.

Every key of a file must be known: it maps to one of our options, must have the only value that we
support, or has no effect on the model. Any other key is rejected by name, because it could change
the model.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.checkpoint.saved_state import check_value
from megatron_lite.config import Config, JsonObject, Options
from megatron_lite.config.mup import with_factors
from megatron_lite.config.system import DTYPES
from megatron_lite.config.values import FLAGS, LARGEST_INTEGER, BadValueError
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    POWERS,
    allowed,
    base_of,
    biases_of,
    check_exportable,
    raised,
    shown,
)
from megatron_lite.huggingface.block_keys import is_count, read_blocks, write_blocks
from megatron_lite.huggingface.rope_keys import ORIGINAL, ROPE_KEYS, read_rope, write_rope

TRAINING_KEY = "megatron_lite"  # what is known about the training, see `saved_state.TRAINING`
# Keys that must have one of these values if present, unless the architecture reads them.
_FALSE = "is_encoder_decoder add_cross_attention attention_bias mlp_bias use_sliding_window".split()
_NULL = "cross_attention_hidden_size per_layer_config auto_map quantization_config sliding_window".split()
_CONSTANTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FALSE, (False, None)),
    **dict.fromkeys(_NULL, (None,)),
    "pruned_heads": ({}, None),
    "partial_rotary_factor": (1.0, None),
}
# Keys without effect on the model: origin, precision of the files, tokens, generation settings,
# classifier labels, and keys that older versions of transformers wrote into every file.
_MEANINGLESS = frozenset(
    f"""
    {TRAINING_KEY} architectures model_type _name_or_path name_or_path transformers_version _commit_hash dtype
    torch_dtype bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    use_cache
    finetuning_task task_specific_params problem_type id2label label2id num_labels _num_labels
    return_dict output_hidden_states output_attentions output_scores torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward is_decoder tie_encoder_decoder tie_last_hidden_states gradient_checkpointing
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    experts_implementation _experts_implementation _flash_attn_2_enabled pretraining_tp
    max_length max_new_tokens min_length min_new_tokens early_stopping max_time do_sample num_beams num_beam_groups
    temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff diversity_penalty repetition_penalty
    encoder_repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids force_words_ids penalty_alpha
    renormalize_logits constraints forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_decoder_ids sequence_bias
    guidance_scale low_memory num_return_sequences return_dict_in_generate encoder_no_repeat_ngram_size
    n_ctx output_past summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner
    max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache validate_runner_input
    classifier_dropout head_dim cache_implementation _sliding_window_pattern max_window_layers
    initial_context_length is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """.split()
)
_CAPS = ("logit_soft_cap", "attention_soft_cap")  # 0 is null in files
# Files may state these keys under a second name, which must agree.
_SECOND_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_experts": "num_local_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_local_experts",
    "num_experts_per_tok": "experts_per_token",
}


_OF_IMAGES = frozenset(
    """
    text_config vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    """.split()
)


def text_part(content: JsonObject) -> JsonObject:
    """Return the config.json of the text part of a Gemma 3 of texts and images; another one as it
    is."""
    text = content.get("text_config") or {}
    if content.get("model_type") != "gemma3" or not isinstance(text, dict):
        return content
    others = {key: value for key, value in content.items() if key not in _OF_IMAGES}
    # transformers does not cap the logits of this class, and ties them by the outer key
    outer = {
        "model_type": "gemma3_text",
        "final_logit_softcapping": None,
        "tie_word_embeddings": content.get("tie_word_embeddings", True),
    }
    return others | text | outer


def model_values(content: JsonObject) -> Options:
    """Return the options in a config.json: architecture, dropouts and initialization.

    None is a value: no window, or no such rotary parameter.

    Raises:
        CheckpointError: names each key that is unknown or has a value that our options cannot
        express.
    """
    name = content.get("model_type")
    if name == "deepseek_v3":
        raise CheckpointError(
            "config.json: model_type 'deepseek_v3' compresses keys and values (multi-head latent attention, MLA), "
            "which no option expresses; give another model"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        why = "of texts and images" if "vision_config" in content else "not known"
        raise CheckpointError(
            f"config.json: model_type {shown(name)} is {why}; supported: {', '.join(ARCHITECTURES)}, and the text part "
            "of gemma3"
        )
    reading = _Reading(name, content)
    dropouts = {"hidden_dropout": 0.0, "embedding_dropout": 0.0}  # unless a key sets them
    values = {**ARCHITECTURES[name].fixed, **dropouts, "use_layer_norm_weight": True}
    values |= reading.named() | reading.positions() | reading.biases() | reading.switches()
    values |= read_blocks(reading)
    key = reading.architecture.key_of("num_experts")
    if key in reading.architecture.defaults and values.get("num_experts") == 1:
        reading.problems.append(f"{key} is 1; it must be 2 or more")
    if values["window_size"] is None:
        values |= {"attention_pattern": (), "window_rotary_base": None}
    reading.problems += [
        f"{reading.architecture.key_of(option)} is {shown(values[option])}; only {shown(value)} can be expressed"
        for option, value in ARCHITECTURES[name].fixed.items()
        if not allowed(value, values[option])
    ]
    reading.refuse_other_keys()
    values = {option: reading.checked(option, value) for option, value in values.items()}
    if reading.problems:
        raise CheckpointError(f"config.json ({name}): " + "\n".join(reading.problems))
    return values


class _Reading:
    """A config.json being read, with the keys used and problems found so far."""

    def __init__(self, name: str, content: JsonObject) -> None:
        self.name = name
        self.content = content
        self.architecture = ARCHITECTURES[name]
        self.used = {*self.architecture.defaults}
        self.problems: list[str] = []

    def get(self, key: str) -> Any:
        """Return the value of a key or its second name, or the default of transformers."""
        self.used.add(key)
        value = self.content.get(key, self.architecture.defaults.get(key))
        second = _SECOND_NAMES.get(key)
        if second is None or second not in self.content:
            return value
        self.used.add(second)
        if key in self.content and self.content[second] != value:
            self.problems.append(
                f"{second} is {shown(self.content[second])}, but {key} is {shown(value)}"
            )
        return self.content[second]

    def flag(self, key: str) -> bool:
        """Return the value of a key that must be true or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            self.problems.append(f"{key} is {shown(value)}; it must be true or false")
        return bool(value)

    def named(self) -> Options:
        """Return the options that have a key, deriving those that are null."""
        values = {
            option: _power(self.get(key), POWERS.get(key, 1.0))
            for key, option in self.architecture.keys.items()
        }
        if self.name == "gpt_bigcode":
            self._multi_query(values)
        for option in ("hidden_size", "num_attention_heads"):
            if not is_count(values[option]):
                self.problems.append(
                    f"{self.architecture.key_of(option)} is {shown(values[option])}; it must be a number >= 1"
                )
                return {}
        heads, width = values["num_attention_heads"], values["hidden_size"]
        derived = {
            "head_groups": heads,
            "kv_channels": width // heads,
            "ffn_hidden_size": values.get("moe_ffn_hidden_size") or 4 * width,
        }
        values |= {option: value for option, value in derived.items() if values.get(option) is None}
        values |= {option: 0.0 for option in _CAPS if option in values and values[option] is None}
        scale = self.architecture.embedding_scale(min(width, LARGEST_INTEGER))
        if scale is not None:
            values["embedding_scale"] = scale
        if "activation_type" not in values:
            return values
        activation = values["activation_type"]
        if self.name == "gemma" and activation == "gelu":  # the first files say so of its tanh form
            activation = "gelu_pytorch_tanh"
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            self.problems.append(
                f"activation {shown(activation)} is not known; known: {', '.join(ACTIVATIONS)}"
            )
            activation = "silu"
        values["activation_type"] = ACTIVATIONS[activation]
        # Only a choice of precision, which transformers does not fix unless the key is true.
        if not values.get("attention_softmax_in_fp32", True):
            del values["attention_softmax_in_fp32"]
        return values

    def _multi_query(self, values: Options) -> None:
        groups = 1 if self.flag("multi_query") else values["num_attention_heads"]
        # transformers 5 writes the number derived from multi_query
        stated = self.get("num_key_value_heads")
        if stated not in (None, groups):
            self.problems.append(
                f"num_key_value_heads is {shown(stated)}; multi_query makes it {groups}"
            )
        values["head_groups"] = groups

    def positions(self) -> Options:
        """Return the rotary position options."""
        if not self.architecture.fixed["use_rotary_embeddings"]:
            return {}
        self.used |= {*ROPE_KEYS, "rotary_emb_base", ORIGINAL} & {
            *ROPE_KEYS,
            *self.architecture.defaults,
        }
        length = self.get("max_position_embeddings")
        if "window_rotary_base" in self.architecture.fixed:
            values, problems = read_rope(self.content, length, self.architecture)
        else:
            values, problems = self._by_kind_of_block(length)
        self.problems += problems
        return values

    def _by_kind_of_block(self, length: Any) -> tuple[Options, list[str]]:
        """Read rotary parameters of blocks with full attention, and of those with a window."""
        both = self.content.get("rope_parameters")
        objects = dict.fromkeys(("full_attention", "sliding_attention"))
        if isinstance(both, dict) and both.keys() <= objects.keys():
            objects |= both
        elif both is not None:
            self.problems.append(
                f"rope_parameters is {shown(both)}; it must have {' and '.join(objects)}"
            )
        full, local = objects.values()
        values, problems = read_rope(
            {**self.content, "rope_parameters": full}, length, self.architecture
        )
        base = self.architecture.defaults["rope_theta"]
        if "rope_local_base_freq" in self.architecture.defaults:
            base = self.get("rope_local_base_freq")
        elif not local and (stated := self.content.get("rope_theta", base)) != base:
            problems.append(
                f"rope_theta is {shown(stated)}: for blocks with a window, transformers 5 takes {base} instead, and "
                f"version 4 does not; state rope_parameters of both kinds, {' and '.join(objects)}"
            )
        if not local:
            local = {"rope_theta": base}
        own, wrong = read_rope({"rope_parameters": local}, length, self.architecture)
        if (part := own["rotary_percent"]) != values["rotary_percent"]:
            wrong.append(
                f"partial_rotary_factor of sliding_attention is {shown(part)}; only that of full_attention, "
                f"{shown(values['rotary_percent'])}, can be expressed"
            )
        if own != values and own["rope_type"] != "default":
            wrong.append("sliding_attention must be scaled as full_attention is, or not at all")
        values["window_rotary_base"] = None if own == values else own["rotary_base"]
        return values, problems + wrong

    def biases(self) -> Options:
        """Return the bias options that the architecture's files always have or set by a key."""
        found = dict.fromkeys(self.architecture.always_biased, True)
        for key, options in self.architecture.biases.items():
            found |= dict.fromkeys(options, self.flag(key))
        return found

    def switches(self) -> Options:
        """Return the options that a key which is true or false decides."""
        return {
            option: value if self.flag(key) else FLAGS[option].default
            for key, (option, value) in self.architecture.switches.items()
        }

    def refuse_other_keys(self) -> None:
        """Report unknown keys, and constants with other values."""
        constants = {
            **_CONSTANTS,
            **self.architecture.constants,
        }
        for key, value in self.content.items():
            if key in self.used or key in _MEANINGLESS or _is_mxfp4(key, value):
                continue
            if key not in constants:
                effect = "might change the model; remove it if it does not"
                self.problems.append(f"{key[:80]}: {shown(value)} is not known and {effect}")
            elif value not in constants[key]:
                self.problems.append(
                    f"{key} is {shown(value)}; only {shown(constants[key][0])} can be expressed"
                )

    def checked(self, option: str, value: Any) -> Any:
        """Return a value after checking the type and bounds of its option; report problems under
        its key."""
        if (value is None and FLAGS[option].optional) or isinstance(value, tuple):
            return value
        try:
            check_value(FLAGS[option], list(value) if isinstance(value, tuple) else value)
        except BadValueError as error:
            key = self.architecture.key_of(option)
            self.problems.append(f"{key} is {shown(self.content.get(key, value))}: {error}")
            return None
        if isinstance(value, list):
            return tuple(map(float, value)) if FLAGS[option].kind == "float" else tuple(value)
        return float(value) if FLAGS[option].kind == "float" else value


def _is_mxfp4(key: str, value: Any) -> bool:
    """Return whether a key states the form that `four_bit_floats` decodes."""
    stated = key == "quantization_config" and isinstance(value, dict)
    return stated and value.get("quant_method") == "mxfp4"


def _power(value: Any, power: float) -> Any:
    """Return a positive number to a power; what is none stays as it is, for `checked` to report."""
    is_number = isinstance(value, int | float) and 0 < value <= LARGEST_INTEGER
    return raised(value, power) if is_number and not isinstance(value, bool) else value


def _as_typed(value: float, default: Any) -> int | float:
    """Return a number, if it is whole of the type of the default."""
    return int(value) if value.is_integer() and isinstance(default, int) else value


def hugging_face_config(config: Config, special_tokens: JsonObject) -> JsonObject:
    """Return config.json for a resolved configuration.

    Contains both spellings of the dtype and of rotary positions: transformers 5 reads `dtype` and
    `rope_parameters`, older versions `torch_dtype`, `rope_theta` and `rope_scaling`.

    Args:
        special_tokens: ids by name; an end may be a list.

    Raises:
        UsageError: if no architecture can express the model.
    """
    model = with_factors(config.model)
    name = check_exportable(model, config.training.export_model_type)
    architecture = ARCHITECTURES[name]
    dtype = DTYPES[config.training.export_dtype].torch
    content: JsonObject = {
        "architectures": [architecture.class_name],
        "model_type": name,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": special_tokens.get("bos_token_id"),
        "eos_token_id": special_tokens.get("eos_token_id"),
        "pad_token_id": special_tokens.get("pad_token_id"),
        "use_cache": True,
    }
    content |= {key: getattr(model, option) for key, option in architecture.keys.items()}
    factor = architecture.key_of("attention_scale")
    if factor in content and content[factor] is None:
        content[factor] = model.kv_channels**-0.5
    content |= {
        key: _as_typed(base_of(content[key], power), architecture.defaults[key])
        for key, power in POWERS.items()
        if key in content
    }
    content |= {
        key: content[key] or None for key in map(architecture.key_of, _CAPS) if key in content
    }
    content["initializer_range"] = min(1.0, model.init_method_std)
    activations = [theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation_type]
    # transformers and `_Reading.named` take gelu for its tanh form in Gemma
    usual = {"gpt2": "gelu_new", "gemma": "gelu_python"}.get(name)
    key = architecture.key_of("activation_type")
    if key in architecture.defaults:
        content[key] = usual if usual in activations else activations[0]
    biases = biases_of(name, model)
    content |= {key: biases[options[0]] for key, options in architecture.biases.items()}
    content |= write_blocks(architecture, model)
    for key, (option, value) in architecture.switches.items():
        content[key] = getattr(model, option) == value
    if name == "gpt_bigcode":
        content["multi_query"] = model.head_groups == 1
    if architecture.fixed["use_rotary_embeddings"]:
        # With learned positions, the rows of their table; with rotary ones, the trained length.
        content["max_position_embeddings"] = max(
            model.max_position_embeddings, config.batch.sequence_length
        )
        content |= write_rope(model, architecture)
    return content
