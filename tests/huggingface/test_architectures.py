"""config.json of seven architectures, read and written, against transformers' own configuration
classes."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lite.config import Config, ModelConfig
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.huggingface.architectures import ARCHITECTURES, check_exportable
from megatron_lite.huggingface.config_file import (
    hugging_face_config,
    model_values,
    text_part,
)
from megatron_lite.huggingface.model_folder import resolved_model
from megatron_lite.huggingface.rope_keys import ROPE_OPTIONS
from megatron_lite.model.rotary import attention_factor, rotary_frequencies
from tests.support.families import FAMILIES, FIRST_BY_DEFAULT, make_config
from tests.support.folder_checks import our_config, resolved_config
from tests.support.public_configs import BIGCODE, PUBLIC, SIZES, public_config

# What the base class of transformers 4 writes in addition to version 5 when everything is written.
VERSION_4 = json.loads("""{
  "torchscript": false, "use_bfloat16": false, "tf_legacy_loss": false, "pruned_heads": {}, "is_decoder": false,
  "cross_attention_hidden_size": null, "add_cross_attention": false, "tie_encoder_decoder": false, "max_length": 20,
  "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1, "num_beam_groups": 1,
  "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
  "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
  "bad_words_ids": null, "num_return_sequences": 1, "output_scores": false, "return_dict_in_generate": false,
  "forced_bos_token_id": null, "forced_eos_token_id": null, "remove_invalid_values": false,
  "exponential_decay_length_penalty": null, "suppress_tokens": null, "begin_suppress_tokens": null,
  "finetuning_task": null, "tokenizer_class": null, "prefix": null, "sep_token_id": null, "torch_dtype": "bfloat16",
  "decoder_start_token_id": null, "task_specific_params": null, "problem_type": null, "_name_or_path": "somewhere",
  "_attn_implementation_autoset": true, "attn_implementation": null, "output_attentions": false,
  "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}
}""")
families = pytest.mark.parametrize("family", FAMILIES)


def content_of(config: Any) -> dict[str, Any]:
    """Every key of the config that transformers writes."""
    return json.loads(config.to_json_string(use_diff=False))


def as_version_4(content: dict[str, Any]) -> dict[str, Any]:
    """Return the same in the layout of transformers 4, with everything else that it writes."""
    content = dict(content)
    rope = dict(content.pop("rope_parameters", None) or {})
    if "full_attention" in rope:
        if content["model_type"] == "olmo3":  # version 4 has one base for all blocks
            return {**VERSION_4, **content, "rope_parameters": rope}
        content["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if rope:
        old = "gpt_neox" == content["model_type"]
        content["rotary_emb_base" if old else "rope_theta"] = rope.pop("rope_theta")
        if (part := rope.pop("partial_rotary_factor", None)) is not None:
            content["rotary_pct" if old else "partial_rotary_factor"] = part
        kind = rope.pop("rope_type")
        content["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return {**VERSION_4, **content}


def exported_as(model_type: str, config: Config) -> Config:
    training = dataclasses.replace(config.training, export_model_type=model_type)
    return dataclasses.replace(config, training=training)


def family_values(family: str, **changes: Any) -> dict[str, Any]:
    return model_values(content_of(make_config(family, **changes)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A key that a file leaves out means what transformers takes for it, tied embeddings and
    dropouts included."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for key, value in ARCHITECTURES[name].defaults.items():
        if key == "rope_parameters":
            assert value.items() <= config.rope_parameters.items()
        elif key in defaults:
            assert (defaults[key], type(defaults[key])) == (value, type(value)), key
        else:  # read by the model, if a file has it
            rope = config.rope_parameters or {}
            part = rope.get("partial_rotary_factor")
            second = ("num_nextn_predict_layers", "num_experts", "num_local_experts")
            read = {name: getattr(config, name, None) for name in second}
            read |= {"head_dim": None, "partial_rotary_factor": part, "rotary_pct": part}
            read["rotary_emb_base"] = rope.get("rope_theta")
            bases = getattr(config, "default_theta", None)
            bases = bases if isinstance(bases, dict) else {"global": bases}
            read |= {"rope_theta": bases["global"], "rope_local_base_freq": bases.get("local")}
            read["auto_map"] = None  # published files of Phi-3 name code like that of transformers
            read |= {"sliding_window_pattern": getattr(config, "_sliding_window_pattern", None)}
            assert value == read[key]
    assert model_values({"model_type": name}) == model_values(content_of(config))


@families
def test_both_layouts_mean_the_same(family: str) -> None:
    """Files of transformers 4 and 5 with every key that either writes, and files without what is
    the default."""
    config = make_config(family)
    values = model_values(content_of(config))
    assert model_values(as_version_4(content_of(config))) == values
    assert model_values(json.loads(config.to_json_string(use_diff=True))) == values


@families
def test_a_read_config_describes_the_model(family: str) -> None:
    """Sizes, head counts, windows, biases, rotary parameters and dropouts, against the keys of the
    fixture."""
    kind = FAMILIES[family]["model_type"]
    attention, hidden = (
        ("attn_pdrop", "resid_pdrop")
        if kind.startswith(("gpt2", "gpt_big"))
        else ("attention_dropout", "residual_dropout")
    )
    dropouts = (
        {attention: 0.25, hidden: 0.5}
        if kind.startswith(("gpt2", "gpt_big")) or kind == "starcoder2"
        else {attention: 0.25}
    )
    config, values = make_config(family, **dropouts), family_values(family, **dropouts)
    assert values["attention_dropout"] == 0.25
    expected = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_attention_heads,
        "init_method_std": config.initializer_range,
        "head_groups": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "window_size": getattr(config, "sliding_window", None),
        "hidden_dropout": dropouts.get(hidden, 0.0),
        "qk_layernorm": kind
        in ("qwen3", "olmo2", "olmo3", "exaone4", "gemma3_text", "qwen3_moe", "olmoe")
        or getattr(config, "use_qk_norm", False),
    }
    if hasattr(config, "num_experts_per_tok"):
        width = (
            "moe_intermediate_size" if kind in ("qwen3_moe", "glm4_moe") else "intermediate_size"
        )
        expected |= {
            "num_experts": config.num_local_experts,
            "num_experts_per_token": config.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(config, width),
            "moe_normalize_top_k": getattr(config, "norm_topk_prob", True),
        }
    rope = getattr(config, "rope_parameters", None)
    rope = rope and rope.get("full_attention", rope)
    if rope:
        names = {
            "rope_type": "rope_type",
            "rope_theta": "rotary_base",
            "partial_rotary_factor": "rotary_percent",
        }
        expected |= {
            names.get(key, f"rope_{key}"): tuple(value) if isinstance(value, list) else value
            for key, value in rope.items()
        }
    assert {option: values[option] for option in expected} == expected


@families
def test_a_written_config_reads_back(family: str) -> None:
    """Our config.json of an imported model means the same model, for us and for transformers."""
    from transformers import AutoConfig

    values = family_values(family)
    content = hugging_face_config(
        exported_as(FAMILIES[family]["model_type"], resolved_config(values)),
        {"bos_token_id": 1, "eos_token_id": 2},
    )
    assert model_values(json.loads(json.dumps(content))) == values
    theirs = content_of(AutoConfig.for_model(**content))
    assert model_values(theirs) == values
    assert (theirs["bos_token_id"], theirs["eos_token_id"], theirs["dtype"]) == (1, 2, "float32")


WITHOUT_WINDOW: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {}),
    ("gemma3_text", {"window_rotary_base": None}),
    ("olmo3, every fourth block full, biases, tied", {"window_rotary_base": None}),
    ("cohere2", {"rotary_pattern": ("nope",)}),
    ("exaone4", {"rotary_pattern": ()}),
    ("exaone4", {"rotary_pattern": (), "window_size": 5, "attention_pattern": ("full",)}),
]


@pytest.mark.parametrize(("family", "changes"), WITHOUT_WINDOW)
def test_transformers_runs_a_family_with_windows_without_any(
    family: str, changes: dict[str, Any]
) -> None:
    """And reads the same model, whether there is no window or no block has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = FAMILIES[family]["model_type"]
    config = our_config(family, **{"window_size": None, "attention_pattern": (), **changes})
    content = hugging_face_config(exported_as(kind, config), {"bos_token_id": 1, "eos_token_id": 2})
    values = model_values(json.loads(json.dumps(content)))
    assert content["model_type"] == kind and values["window_size"] is None
    assert values["rotary_pattern"] == config.model.rotary_pattern
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    with torch.no_grad():
        assert theirs(torch.arange(24)[None]).logits.isfinite().all()


@families
def test_a_family_is_exported_as_itself_or_a_simpler_one(family: str) -> None:
    """Where two architectures express a model, one that most programs read, then the one without
    biases that are only zero, then the better known."""
    simpler = {
        "mistral, yarn, tied": "llama",
        "phi3": "llama",
        "seed_oss": "qwen2",
        "gpt_bigcode, multi-head, untied": "gpt2",
    }
    expected = simpler.get(family, FAMILIES[family]["model_type"])
    assert check_exportable(our_config(family).model) == expected


@pytest.mark.parametrize("name", PUBLIC | SIZES)
def test_public_configs_are_read(name: str) -> None:
    """As transformers reads them: the same values out of the file and out of what transformers
    makes of it."""
    from transformers import AutoConfig

    content = public_config(name)
    values = model_values(content)
    assert values == model_values(content_of(AutoConfig.for_model(**content)))
    assert check_exportable(resolved_config(values).model) in (
        content["model_type"],
        "llama",
        "qwen2",
    )


def test_the_activation_of_gemma() -> None:
    """The first files say gelu and null, and mean the tanh form, in transformers too."""
    from transformers import AutoConfig

    first = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None}
    assert model_values(first)["activation_type"] == "gelu"
    assert AutoConfig.for_model(**first).hidden_act == "gelu_pytorch_tanh"
    exact = our_config("gemma", activation_type="gelu_exact")
    content = hugging_face_config(exact, {})
    assert content["model_type"] == "gemma"
    assert model_values(content)["activation_type"] == "gelu_exact"
    assert AutoConfig.for_model(**content).hidden_act in ("gelu_python", "gelu_exact")


def test_multi_query_in_numbers() -> None:
    """A spot check without transformers; `tests/config/test_presets.py` compares the other public
    ones with presets."""
    bigcode = model_values(json.loads(BIGCODE))
    assert (bigcode["head_groups"], bigcode["activation_type"]) == (1, "gelu_exact")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"mystery": 3}, "mystery: 3 is not known"),
    ("llama", {"hidden_size": "wide"}, "hidden_size is 'wide'"),
    ("llama", {"vocab_size": None}, "vocab_size is None: must be of type int"),
    ("llama", {"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000: too large"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0: must be >= 1"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: must be > 0 and <= 1"),
    ("llama", {"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
    ("llama", {"hidden_act": "mish"}, "activation 'mish' is not known; known: gelu_pytorch_tanh"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved is True; only False can be expressed"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0"),
    (
        "llama",
        {"quantization_config": {"bits": 4}},
        "quantization_config is {'bits': 4}; only None",
    ),
    ("llama", {"auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' rotates by the length of each text",
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_type linear needs factor"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "factr": 2.0}},
        "rope_parameters: factr is not known",
    ),
    ("llama", {"rope_parameters": 5}, "rope_parameters is 5; it must be an object or null"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0},
        "rope_theta is 6.0, but 5.0",
    ),
    (
        "llama",
        {
            "rope_parameters": {"rope_type": "default"},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        "contradict each other in rope_type: 'linear' and 'default'",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "type and rope_type differ",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "rope_factor is 0.5: must be >= 1",
    ),
    ("mistral", {"sliding_window": 0}, "window_size is 0: must be >= 1"),
    ("mistral", {"attention_bias": True}, "attention_bias is True; only False can be expressed"),
    ("llama", {"sliding_window": 4096}, "sliding_window is 4096; only None can be expressed"),
    ("gpt2", {"n_embd": "wide"}, "n_embd is 'wide'; it must be a number >= 1"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False; only True"),
    ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights is None; only True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; only False"),
    ("gpt2", {"n_embd": 96, "hidden_size": 192}, "hidden_size is 192, but n_embd is 96"),
    ("gpt_bigcode", {"num_key_value_heads": 4}, "num_key_value_heads is 4; multi_query makes it 1"),
    (
        "gpt_bigcode",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx: True is not known",
    ),
    ("starcoder2", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm'; only 'layer_norm'"),
    ("qwen2", {"use_mrope": True}, "use_mrope is True; only False"),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": "all"},
        "max_window_layers is 'all'; it must be a number",
    ),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]; it must say 0 or 1"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must say 0 or 1"),
    ("granite", {"logits_scaling": 1e-320}, "logits_scaling is 1e-320: "),
    ("gemma3_text", {"sliding_window_pattern": "LG"}, "sliding_window_pattern is 'LG'; it must be"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "default"}},
        "it must have full_attention and",
    ),
    (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention must be scaled as full_attention is, or not at all",
    ),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
        "partial_rotary_factor of sliding_attention is 0.5; only that of full_attention, 1.0,",
    ),
    (
        "olmo3",
        {"rope_theta": 1e4},
        "rope_theta is 10000.0: for blocks with a window, transformers 5 takes 500000.0 instead",
    ),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only None"),
    (
        "qwen3",
        {"layer_types": ["full_attention"]},
        "it must be sliding_attention or full_attention for each",
    ),
    (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 32},
        "there is no window (use_sliding_window)",
    ),
    ("qwen3", {"layer_types": 7}, "layer_types 7"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_inexpressible_keys_are_refused_by_name(
    name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_values({"model_type": name, **keys})
    assert message in str(caught.value)
    assert f"config.json ({name}): " in str(caught.value)
    assert str(caught.value).count("\n") <= 1  # the reason, and at most one that follows from it


@pytest.mark.parametrize("name", ["bert", None, 5, ["llama"]])
def test_an_unknown_model_type(name: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"model_type .* is not known; supported: llama, mistral, gpt2"
    ):
        model_values({"model_type": name})


@pytest.mark.parametrize("name", ["mistral3", "qwen2_vl", "qwen2_5_vl"])
def test_models_of_texts_and_images_are_refused_by_name(name: str) -> None:
    """All but the text part of Gemma 3: see test_families."""
    from transformers import AutoConfig

    content = json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False))
    with pytest.raises(CheckpointError, match=f"model_type '{name}' is of texts and images;"):
        model_values(text_part(content))
    with pytest.raises(CheckpointError, match=r"mystery: 3 is not known .*\n.* only False"):
        text = {"use_bidirectional_attention": True, "model_type": "gemma3_text"}
        model_values(text_part({"model_type": "gemma3", "text_config": text, "mystery": 3}))


def test_second_names_of_keys() -> None:
    """transformers reads the sizes of GPT-2 under the names that other architectures have for them,
    too."""
    from transformers import GPT2Config

    sizes = {
        "hidden_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "max_position_embeddings": 77,
    }
    values = model_values({"model_type": "gpt2", **sizes})
    assert values == model_values(content_of(GPT2Config(**sizes)))
    assert (values["hidden_size"], values["num_layers"], values["max_position_embeddings"]) == (
        96,
        5,
        77,
    )


@pytest.mark.parametrize("family", FIRST_BY_DEFAULT)
def test_damaged_values_never_end_in_anything_but_a_checkpoint_error(family: str) -> None:
    """Whatever stands behind a key, of the rotary parameters too: values, or one error that names
    the file."""
    content = content_of(make_config(family))
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        10**400,
        0.5,
        -0.0,
        float("inf"),
        "",
        "x",
        [],
        [[]],
        {},
        {"a": 1},
        ["x"],
        [{}],
    ]
    contents = [{**content, key: value} for key in content for value in odd]
    rope = content.get("rope_parameters") or {}
    contents += [
        {**content, "rope_parameters": {**rope, key: value}} for key in rope for value in odd
    ]
    read = 0
    for damaged in contents:
        try:
            values = model_values(damaged)
        except CheckpointError as error:
            assert str(error).startswith("config.json")
            continue
        assert all(not isinstance(value, (list, dict)) for value in values.values())
        read += 1
    assert 0 < read < len(contents)


def test_every_problem_is_told() -> None:
    with pytest.raises(CheckpointError) as caught:
        model_values(
            {"model_type": "llama", "mystery": 3, "puzzle": None, "mlp_bias": "no", "vocab_size": 1}
        )
    lines = str(caught.value).removeprefix("config.json (llama): ").splitlines()
    wanted = ("mlp_bias is 'no'; it must be true or false", "mystery", "puzzle", "vocab_size is 1")
    assert tuple(line.split(": ")[0] for line in lines) == wanted


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, {"rope_factor": 4.0}),
        ({"rope_type": "yarn", "factor": 2.0}, {"rope_original_max_position_embeddings": 2048}),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "beta_fast": None},
            {"rope_mscale": None, "rope_mscale_all_dim": None, "rope_beta_fast": 32.0},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 2,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "attention_factor": 1.5,
            },
            {
                "rope_mscale": None,
                "rope_attention_factor": 1.5,
                "rope_factor": 2.0,
                "rope_truncate": True,
            },
        ),
        (
            {"type": "llama3", "factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4},
            {"rope_original_max_position_embeddings": 2048, "rope_type": "llama3"},
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 1.0},
            {"rope_type": "default", "rotary_base": 10000.0},
        ),
        ({}, {"rope_type": "default", "rope_factor": None}),
    ],
)
def test_rotary_parameters_that_transformers_derives(
    rope: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Missing keys take transformers' defaults; parameters that it ignores are dropped."""
    for key in ("rope_scaling", "rope_parameters"):
        values = model_values({"model_type": "llama", key: rope})
        assert {option: values[option] for option in expected} == expected
        assert not any(
            isinstance(value, int) for option, value in values.items() if option == "rope_factor"
        )


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0},
}


@pytest.mark.filterwarnings("ignore")
def test_nulls_and_keys_of_other_types_mean_what_they_mean_in_transformers() -> None:
    """The same angles and factor. Needed keys have no null, and some take no number."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    keys = sorted(option.removeprefix("rope_") for option in ROPE_OPTIONS)
    sizes = dict(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    compared = 0
    for (kind, needed), key, value in itertools.product(
        ROPES.items(), (*keys, "finetuned"), (None, 3.0)
    ):
        parameters = {"rope_type": kind, **needed, key: value}
        try:
            theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(parameters)))
            options = model_values({"model_type": "llama", **sizes, "rope_parameters": parameters})
        except Exception:  # of either
            assert key in needed or "original" in key or (key, value) == ("truncate", 3.0), (
                parameters
            )
            continue
        model = resolved_model(options, "the file")
        assert torch.equal(rotary_frequencies(model, 8, torch.device("cpu")), theirs.inv_freq), (
            parameters
        )
        assert attention_factor(model) == theirs.attention_scaling, parameters
        compared += 1
    assert compared > 70


def llama_model(**changes: Any) -> ModelConfig:
    return our_config("llama", **changes).model


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "llama"),
        ({"window_size": 7}, "mistral"),
        ({"add_qkv_biases": True}, "qwen2"),
        ({"add_qkv_biases": True, "window_size": 7}, "qwen2"),
        ({"add_qkv_biases": True, "add_mlp_biases": True}, "llama"),
        ({"add_linear_biases": True, "add_qkv_biases": False}, "llama"),
        ({"qk_layernorm": True}, "qwen3"),
        (
            {
                "qk_layernorm": True,
                "add_linear_biases": True,
                "add_qkv_biases": True,
                "window_size": 7,
            },
            "qwen3",
        ),
        ({"rope_type": "yarn", "rope_factor": 4.0, "window_size": 7}, "mistral"),
        ({"zero_centered_normalization": True}, "llama"),
        ({"use_layer_norm_weight": False}, "llama"),
        ({"full_precision_residual": True, "attention_softmax_in_fp32": True}, "llama"),
    ],
)
def test_the_architecture_of_options(changes: dict[str, Any], architecture: str) -> None:
    assert check_exportable(llama_model(**changes)) == architecture


NOTHING: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "llama",
        {"norm_placement": "both", "add_mlp_biases": True},
        ["LlamaForCausalLM: --norm_placement=pre (not both)\n"],
    ),
    (
        "llama",
        {"input_embedding_norm": True},
        ["LlamaForCausalLM: --input_embedding_norm=0 (not 1)\n"],
    ),
    ("llama", {"logit_soft_cap": 30.0}, ["LlamaForCausalLM: --logit_soft_cap=0 (not 30)\n"]),
    (
        "llama",
        {"rotary_percent": 0.5, "kv_channels": 8, "add_mlp_biases": True},
        ["LlamaForCausalLM: --rotary_percent=1 (not 0.5)\n"],
    ),
    (
        "llama",
        {"scale_attn_by_inverse_layer_idx": True},
        ["Llama", "--scale_attn_by_inverse_layer_idx=0 (not 1)\n"],
    ),
    (
        "llama",
        {"qk_layernorm": True, "add_mlp_biases": True},
        ["Qwen3ForCausalLM: --add_mlp_biases=0 (not 1)\n"],
    ),
    (
        "llama",
        {"add_linear_biases": True, "window_size": 7, "logit_soft_cap": 5.0},
        [
            "LlamaForCausalLM: --logit_soft_cap=0 (not 5), --window_size=none (not 7)\n",
            "MistralForCausalLM: --logit_soft_cap=0 (not 5), --add_linear_biases=0 (not 1)",
        ],
    ),
    ("llama", {"use_position_embeddings": True}, ["--use_position_embeddings=0 (not 1)"]),
    (
        "llama",
        {"normalization_type": "layer_norm", "add_mlp_biases": True},
        ["--normalization_type=rms_norm (not layer_norm)", "--gated=0"],
    ),
    (
        "llama",
        {"gated": False},
        ["--gated=1 (not 0)", "--normalization_type=layer_norm (not rms_norm)"],
    ),
    ("llama", {"use_rotary_embeddings": False}, ["--use_rotary_embeddings=1 (not 0)"]),
    (
        "llama",
        {"hidden_size": 31, "add_linear_biases": True, "logit_soft_cap": 5.0},
        [
            "a multiple of --num_attention_heads=5 as --hidden_size (not 31)",
            "--add_linear_biases=0 (not 1)",
        ],
    ),
    ("gpt2", {"num_attention_heads": 6, "head_groups": 2}, ["--head_groups=6 (not 2)"]),
    (
        "gpt2",
        {"kv_channels": 10},
        ["--kv_channels * --num_attention_heads=3 = --hidden_size=24 (not 10)"],
    ),
    ("gpt2", {"window_size": 8}, ["--window_size=none (not 8)"]),
    (  # transformers refuses a file whose query_pre_attn_scalar is no whole number
        "gemma2",
        {"attention_scale": 0.3},
        ["Gemma2ForCausalLM: 1 / the root of a whole number as --attention_scale (not 0.3)"],
    ),
    ("gemma2", {"attention_scale": 1e-200}, ["--attention_scale (not 1e-200)"]),
]


@pytest.mark.parametrize(("family", "changes", "flags"), NOTHING)
def test_models_that_no_architecture_expresses(
    family: str, changes: dict[str, Any], flags: list[str]
) -> None:
    """The error says which flags each architecture would need, and the two other ways out."""
    with pytest.raises(UsageError) as caught:
        check_exportable(our_config(family, **changes).model)
    for text in [*flags, "--export_format=distributed", "--export_interval"]:
        assert text in str(caught.value) + "\n"


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "gpt2"),
        ({"head_groups": 1}, "gpt_bigcode"),
        ({"scale_attn_by_inverse_layer_idx": True}, "gpt2"),
        ({"add_linear_biases": False, "add_qkv_biases": False, "add_mlp_biases": False}, "gpt2"),
    ],
)
def test_learned_positions(changes: dict[str, Any], architecture: str) -> None:
    """GPT-2's family; missing biases are written as zeros."""
    assert check_exportable(our_config("gpt2", **changes).model) == architecture


def test_olmo3_in_the_layout_of_transformers_4() -> None:
    """Its one base is lost in blocks with a window, where transformers 5 takes the default: such a
    folder is refused, unless both mean the same."""
    from transformers import AutoConfig

    content = {"model_type": "olmo3", "rope_theta": 1e4}
    theirs = AutoConfig.for_model(**content).rope_parameters
    assert [theirs[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")] == [1e4, 5e5]
    with pytest.raises(CheckpointError, match="state rope_parameters of both kinds"):
        model_values(content)
    same = model_values({"model_type": "olmo3", "rope_theta": 5e5})
    assert same == model_values({"model_type": "olmo3"})
    assert (same["rotary_base"], same["window_rotary_base"]) == (5e5, None)
    both = {f"{kind}_attention": {"rope_theta": 1e4} for kind in ("full", "sliding")}
    assert model_values({**content, "rope_parameters": both})["rotary_base"] == 1e4


@pytest.mark.parametrize(
    ("family", "pattern"), [("llama", {"rotary_pattern": ("rotary",)}), ("mistral, window", {})]
)
def test_a_pattern_of_equal_blocks_is_none(family: str, pattern: dict[str, Any]) -> None:
    """However it is written; exports compare the shortest form."""
    pattern = pattern or {"attention_pattern": ("window", "window")}
    assert our_config(family, **pattern).model == our_config(family).model


@pytest.mark.parametrize("edit", [lambda c: c, as_version_4])
def test_head_counts_that_a_file_leaves_to_transformers(edit: Callable[[Any], Any]) -> None:
    """null means: as many key heads as query heads, heads that share the width, an MLP of four
    widths."""
    values = model_values(
        edit({"model_type": "qwen2", "num_key_value_heads": None, "head_dim": None})
    )
    assert (values["head_groups"], values["kv_channels"]) == (32, 128)
    assert model_values(edit({"model_type": "qwen3", "hidden_size": 1024}))["kv_channels"] == 128
    assert (
        model_values(edit({"model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_inner": None}))[
            "ffn_hidden_size"
        ]
        == 96
    )
