"""A table of Hugging Face architectures, and the choice of one that can express a model. Imports no
torch.

Keys and defaults of config.json follow the configuration classes of transformers 5.23; version 4 is
the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_lite.config import Config, JsonObject, ModelConfig, Options
from megatron_lite.config.mup import with_factors
from megatron_lite.config.values import FLAGS, written
from megatron_lite.errors import UsageError

# Our activations -> Hugging Face's names; exports write the first.
_SPELLINGS = {
    "gelu": "gelu_pytorch_tanh gelu_new gelu_fast gelu_python_tanh gelu_accurate",
    "gelu_exact": "gelu gelu_python",
    "silu": "silu swish",
    "squared_relu": "relu2",
    "identity": "linear",
    **{name: name for name in ("relu", "quick_gelu", "tanh")},
}
ACTIVATIONS = MappingProxyType(
    {theirs: ours for ours, names in _SPELLINGS.items() for theirs in names.split()}
)

# One paragraph a family: its `model_type`, its class, and the family that it is like, whose lines it
# adds to or replaces; the value "-" removes.
#   key     keys of config.json, with the value that transformers takes if the key is missing (null:
#           derived from other keys, as in our options); config_file.py handles keys that need more
#           than renaming
#   must    keys of config.json, with the only value that we can express, or several: a|b
#   only    our options that have only one value in the family; biases and windows follow from the keys.
#           embedding_scale=width is the root of hidden_size; rotary_pattern=windows rotates blocks with
#           a window alone, unless no block has one; windows_alone: even then
#   true    keys of config.json that are true or false, with an option and its value if true
#   biases  keys of config.json, if the family has them, with the options that each states; with
#           "all": options of biases that every file has, perhaps as zeros
#   full    "every": how many blocks share one with full attention, the last, if layer_types is missing
#   rows    rotary=interleaved: files pair channels 0 and 1, 2 and 3 ..., which we pair across halves;
#           experts=transposed: one tensor for all experts' up and down weights each, columns for rows,
#           gate and up taking turns
#   name    our modules, with their names in files that differ from `weight_map`'s
#   memory  the same for files that have transformers' own names of the parameters, with one tensor
#           for the experts of a block
#   fp32    modules that every file has in fp32
#   option  keys of config.json, with an option that differs from that of other families
_FAMILIES = """
shared -
  only    norm_placement=pre input_embedding_norm=false qk_layernorm=false logit_soft_cap=0.0
  only    embedding_scale=1.0 residual_scale=1.0 attention_scale=null attention_soft_cap=0.0
  only    logit_scale=1.0 parallel_branches=none
  only    qk_norm_scope=head use_layer_norm_bias=true rotary_pattern=[] window_rotary_base=null
  only    scale_attn_by_inverse_layer_idx=false use_rotary_embeddings=true
  only    use_position_embeddings=false normalization_type=rms_norm gated=true attention_sinks=false
  only    activation_limit=0.0 num_experts=1
  biases  attention_bias=add_linear_biases,add_qkv_biases mlp_bias=add_mlp_biases
  biases  use_bias=add_linear_biases,add_qkv_biases,add_mlp_biases

llama LlamaForCausalLM shared
  key     vocab_size=32000 hidden_size=4096 num_hidden_layers=32 num_attention_heads=32
  key     num_key_value_heads=null head_dim=null intermediate_size=11008 hidden_act=silu
  key     max_position_embeddings=2048 initializer_range=0.02 attention_dropout=0.0
  key     tie_word_embeddings=false rms_norm_eps=1e-6 attention_bias=false mlp_bias=false
  must    rope_interleaved=false
  only    rotary_percent=1.0

mistral MistralForCausalLM llama
  key     num_key_value_heads=8 intermediate_size=14336 max_position_embeddings=131072
  key     sliding_window=4096 attention_bias=- mlp_bias=-
  must    rope_interleaved=-

gpt2 GPT2LMHeadModel shared
  key     vocab_size=50257 n_embd=768 n_layer=12 n_head=12 n_inner=null activation_function=gelu_new
  key     n_positions=1024 initializer_range=0.02 layer_norm_epsilon=1e-5 attn_pdrop=0.1
  key     resid_pdrop=0.1 embd_pdrop=0.1 tie_word_embeddings=true
  key     scale_attn_by_inverse_layer_idx=false reorder_and_upcast_attn=false
  must    scale_attn_weights=true add_cross_attention=false
  only    scale_attn_by_inverse_layer_idx=- use_rotary_embeddings=false use_position_embeddings=true
  only    normalization_type=layer_norm gated=false
  biases  all=add_linear_biases,add_qkv_biases,add_mlp_biases

gpt_bigcode GPTBigCodeForCausalLM gpt2
  key     activation_function=gelu_pytorch_tanh scale_attn_by_inverse_layer_idx=-
  key     reorder_and_upcast_attn=- multi_query=true
  only    scale_attn_by_inverse_layer_idx=false

starcoder2 Starcoder2ForCausalLM llama
  key     vocab_size=49152 hidden_size=3072 num_hidden_layers=30 num_attention_heads=24
  key     num_key_value_heads=2 intermediate_size=12288 hidden_act=gelu_pytorch_tanh
  key     max_position_embeddings=4096 initializer_range=0.018042 tie_word_embeddings=true
  key     rms_norm_eps=- norm_epsilon=1e-5 residual_dropout=0.0 embedding_dropout=0.0
  key     sliding_window=null attention_bias=- mlp_bias=- use_bias=true
  must    rope_interleaved=- norm_type=layer_norm mlp_type=default
  only    normalization_type=layer_norm gated=false
  name    mlp.up=mlp.c_fc mlp.down=mlp.c_proj

qwen2 Qwen2ForCausalLM llama
  key     vocab_size=151936 num_key_value_heads=32 intermediate_size=22016
  key     max_position_embeddings=32768 use_sliding_window=false sliding_window=4096
  key     max_window_layers=28 layer_types=null attention_bias=- mlp_bias=-
  must    rope_interleaved=- use_mrope=false
  biases  all=add_qkv_biases

qwen3 Qwen3ForCausalLM qwen2
  key     head_dim=128 attention_bias=false
  must    use_mrope=-
  only    qk_layernorm=true
  biases  all=-

nemotron NemotronForCausalLM llama
  key     vocab_size=256000 hidden_size=6144 num_attention_heads=48 intermediate_size=24576
  key     hidden_act=relu2 max_position_embeddings=4096 initializer_range=0.0134 rms_norm_eps=-
  key     norm_eps=1e-5 partial_rotary_factor=0.5
  must    rope_interleaved=-
  only    normalization_type=layer_norm gated=false rotary_percent=-
  only    zero_centered_normalization=true

stablelm StableLmForCausalLM llama
  key     vocab_size=50304 hidden_size=2560 num_key_value_heads=32 head_dim=-
  key     intermediate_size=6912 max_position_embeddings=4096 rms_norm_eps=- layer_norm_eps=1e-5
  key     partial_rotary_factor=0.25 attention_bias=- mlp_bias=- use_qkv_bias=false
  key     use_parallel_residual=false
  must    rope_interleaved=- qk_layernorm=false hidden_dropout=0.0
  only    normalization_type=layer_norm rotary_percent=- parallel_branches=-
  true    use_parallel_residual=parallel_branches:one_norm
  biases  use_qkv_bias=add_qkv_biases

gpt_neox GPTNeoXForCausalLM llama
  key     vocab_size=50432 hidden_size=6144 num_hidden_layers=44 num_attention_heads=64
  key     num_key_value_heads=- head_dim=- intermediate_size=24576 hidden_act=gelu
  key     rms_norm_eps=- layer_norm_eps=1e-5 rotary_pct=0.25 rotary_emb_base=10000.0
  key     attention_bias=true mlp_bias=- use_parallel_residual=true
  must    rope_interleaved=- hidden_dropout=0.0
  only    normalization_type=layer_norm gated=false rotary_percent=- parallel_branches=-
  true    use_parallel_residual=parallel_branches:two_norms
  biases  all=add_mlp_biases
  name    embedding.word=gpt_neox.embed_in head.norm=gpt_neox.final_layer_norm
  name    attention.query_key_value=attention.query_key_value attention.output=attention.dense
  name    mlp.up=mlp.dense_h_to_4h mlp.down=mlp.dense_4h_to_h

phi3 Phi3ForCausalLM llama
  key     vocab_size=32064 hidden_size=3072 intermediate_size=8192 max_position_embeddings=4096
  key     rms_norm_eps=1e-5 resid_pdrop=0.0 embd_pdrop=0.0 sliding_window=null attention_bias=-
  key     mlp_bias=- partial_rotary_factor=1.0 original_max_position_embeddings=4096
  key     auto_map=null
  must    rope_interleaved=- lm_head_bias=false full_attn_mod=1 interpolate_factor=1
  only    rotary_percent=- rope_type=default|longrope
  name    attention.query_key_value=self_attn.qkv_proj mlp.up=mlp.gate_up_proj

glm4 Glm4ForCausalLM llama
  key     vocab_size=151552 num_hidden_layers=40 num_key_value_heads=2 head_dim=128
  key     intermediate_size=13696 max_position_embeddings=131072 rms_norm_eps=1.5625e-07
  key     attention_bias=true mlp_bias=- partial_rotary_factor=0.5
  must    rope_interleaved=-
  only    rotary_percent=- norm_placement=both
  biases  attention_bias=add_qkv_biases
  rows    rotary=interleaved
  name    attention_output_norm=post_self_attn_layernorm mlp_output_norm=post_mlp_layernorm
  name    mlp.up=mlp.gate_up_proj

olmo2 Olmo2ForCausalLM llama
  key     vocab_size=50304 rms_norm_eps=1e-5 mlp_bias=-
  must    rope_interleaved=-
  only    norm_placement=post qk_layernorm=true qk_norm_scope=all

olmo3 Olmo3ForCausalLM olmo2
  key     sliding_window=4096 layer_types=null rope_theta=500000.0
  only    window_rotary_base=-
  full    every=4

exaone4 Exaone4ForCausalLM llama
  key     vocab_size=102400 num_key_value_heads=32 intermediate_size=16384 rms_norm_eps=1e-5
  key     attention_bias=- mlp_bias=- sliding_window=4096 sliding_window_pattern=4 layer_types=null
  must    rope_interleaved=-
  only    norm_placement=post qk_layernorm=true rotary_pattern=windows

seed_oss SeedOssForCausalLM llama
  key     vocab_size=155136 num_hidden_layers=64 num_attention_heads=80 num_key_value_heads=8
  key     head_dim=128 intermediate_size=27648 max_position_embeddings=524288
  key     attention_dropout=0.1 residual_dropout=0.1 attention_bias=true attention_out_bias=false
  must    rope_interleaved=-
  biases  attention_bias=add_qkv_biases attention_out_bias=add_linear_biases

smollm3 SmolLM3ForCausalLM llama
  key     vocab_size=128256 hidden_size=2048 num_hidden_layers=36 num_attention_heads=16
  key     num_key_value_heads=4 max_position_embeddings=32768 tie_word_embeddings=true
  key     use_sliding_window=false sliding_window=null layer_types=null rope_theta=2000000.0
  key     no_rope_layers=null no_rope_layer_interval=4
  must    rope_interleaved=-
  only    rotary_pattern=-

gemma GemmaForCausalLM llama
  key     vocab_size=256000 hidden_size=3072 num_hidden_layers=28 num_attention_heads=16
  key     num_key_value_heads=16 head_dim=256 intermediate_size=24576 hidden_act=gelu_pytorch_tanh
  key     max_position_embeddings=8192 tie_word_embeddings=true mlp_bias=-
  must    rope_interleaved=- use_bidirectional_attention=null
  must    hidden_activation=gelu_pytorch_tanh|null
  only    zero_centered_normalization=true embedding_scale=width

gemma2 Gemma2ForCausalLM gemma
  key     hidden_size=2304 num_hidden_layers=26 num_attention_heads=8 num_key_value_heads=4
  key     intermediate_size=9216 hidden_act=- hidden_activation=gelu_pytorch_tanh
  key     query_pre_attn_scalar=256 final_logit_softcapping=30.0 attn_logit_softcapping=50.0
  key     sliding_window=4096 layer_types=null
  must    hidden_activation=- hidden_act=gelu_pytorch_tanh sliding_window_size=4096
  only    norm_placement=both attention_scale=- logit_soft_cap=- attention_soft_cap=-
  full    every=2
  name    mlp_norm=pre_feedforward_layernorm

gemma3_text Gemma3ForCausalLM gemma2
  key     vocab_size=262208 max_position_embeddings=131072 final_logit_softcapping=null
  key     attn_logit_softcapping=- sliding_window_pattern=6 rope_theta=1000000.0
  key     rope_local_base_freq=10000.0
  must    attn_logit_softcapping=null use_bidirectional_attention=false
  only    qk_layernorm=true attention_soft_cap=0.0 window_rotary_base=-
  full    every=-

granite GraniteForCausalLM llama
  key     embedding_multiplier=1.0 residual_multiplier=1.0 attention_multiplier=1.0
  key     logits_scaling=1.0
  must    rope_interleaved=-
  only    embedding_scale=- residual_scale=- attention_scale=- logit_scale=-

mixtral MixtralForCausalLM llama
  key     num_key_value_heads=8 intermediate_size=14336 max_position_embeddings=131072
  key     rms_norm_eps=1e-5 rope_theta=1000000.0 sliding_window=null attention_bias=- mlp_bias=-
  key     num_local_experts=8 num_experts_per_tok=2 router_aux_loss_coef=0.001
  must    rope_interleaved=- output_router_logits=false|true router_jitter_noise=0.0
  only    num_experts=- moe_router_score=softmax moe_normalize_top_k=true num_shared_experts=0
  only    moe_routed_scaling_factor=1.0 moe_router_groups=1 moe_router_bias=false
  only    moe_router_choice_bias=false moe_layer_frequency=1 moe_first_dense_layers=0
  option  intermediate_size=moe_ffn_hidden_size
  name    mlp.router=block_sparse_moe.gate mlp.experts.gate=block_sparse_moe.experts.*.w1
  name    mlp.experts.up=block_sparse_moe.experts.*.w3 mlp.experts.down=block_sparse_moe.experts.*.w2
  memory  mlp.router=mlp.gate mlp.experts.up.weight=mlp.experts.gate_up_proj
  memory  mlp.experts.down.weight=mlp.experts.down_proj

qwen3_moe Qwen3MoeForCausalLM mixtral
  key     vocab_size=151936 hidden_size=2048 intermediate_size=6144 num_hidden_layers=24
  key     num_key_value_heads=4 max_position_embeddings=32768 rms_norm_eps=1e-6 rope_theta=-
  key     use_sliding_window=false sliding_window=4096 attention_bias=false
  key     moe_intermediate_size=768
  key     num_experts=128 num_local_experts=128 num_experts_per_tok=8 norm_topk_prob=false
  key     decoder_sparse_step=1 mlp_only_layers=null
  must    router_jitter_noise=-
  only    qk_layernorm=true moe_normalize_top_k=- moe_layer_frequency=- moe_first_dense_layers=-
  option  intermediate_size=-
  name    mlp.router=- mlp.experts.gate=- mlp.experts.up=- mlp.experts.down=-

olmoe OlmoeForCausalLM qwen3_moe
  key     vocab_size=50304 intermediate_size=2048 num_hidden_layers=16 num_attention_heads=16
  key     num_key_value_heads=null head_dim=- max_position_embeddings=4096 rms_norm_eps=1e-5
  key     use_sliding_window=- sliding_window=- moe_intermediate_size=- num_experts=64
  key     num_local_experts=- decoder_sparse_step=- mlp_only_layers=- router_aux_loss_coef=0.01
  must    clip_qkv=null
  only    qk_norm_scope=all moe_layer_frequency=1 moe_first_dense_layers=0
  option  intermediate_size=moe_ffn_hidden_size

granitemoe GraniteMoeForCausalLM mixtral
  key     num_key_value_heads=null head_dim=- intermediate_size=11008 max_position_embeddings=2048
  key     rms_norm_eps=1e-6 rope_theta=- sliding_window=- attention_bias=false
  key     embedding_multiplier=1.0 residual_multiplier=1.0 attention_multiplier=1.0
  key     logits_scaling=1.0
  must    router_jitter_noise=-
  only    embedding_scale=- residual_scale=- attention_scale=- logit_scale=-
  name    mlp.router=block_sparse_moe.router.layer
  name    mlp.experts.up.weight=block_sparse_moe.input_linear.weight
  name    mlp.experts.down.weight=block_sparse_moe.output_linear.weight
  memory  mlp.router=block_sparse_moe.router
  memory  mlp.experts.up.weight=block_sparse_moe.experts.gate_up_proj
  memory  mlp.experts.down.weight=block_sparse_moe.experts.down_proj

gpt_oss GptOssForCausalLM mixtral
  key     vocab_size=201088 hidden_size=2880 intermediate_size=2880 num_hidden_layers=36
  key     num_attention_heads=64 num_key_value_heads=8 head_dim=64 hidden_act=-
  key     rope_theta=150000.0 sliding_window=128 layer_types=null attention_bias=true
  key     num_local_experts=128 num_experts_per_tok=4 swiglu_limit=7.0
  key     rope_parameters={"rope_type":"yarn","factor":32.0,"truncate":false,"original_max_position_embeddings":4096}
  must    router_jitter_noise=- hidden_act=silu swiglu_alpha=1.702
  only    attention_sinks=true activation_limit=- activation_type=quick_gelu moe_router_bias=true
  biases  all=add_mlp_biases
  full    every=2
  rows    experts=transposed
  name    mlp.router=mlp.router
  name    mlp.experts.up.weight=mlp.experts.gate_up_proj
  name    mlp.experts.up.bias=mlp.experts.gate_up_proj_bias
  name    mlp.experts.down.weight=mlp.experts.down_proj
  name    mlp.experts.down.bias=mlp.experts.down_proj_bias
  memory  mlp.router=mlp.router

glm4_moe Glm4MoeForCausalLM qwen3_moe
  key     vocab_size=151552 hidden_size=4096 intermediate_size=10944 num_hidden_layers=46
  key     num_attention_heads=96 num_key_value_heads=8 max_position_embeddings=131072
  key     rms_norm_eps=1e-5 use_sliding_window=- sliding_window=- moe_intermediate_size=1408
  key     num_experts=- num_local_experts=- n_routed_experts=128 norm_topk_prob=true
  key     decoder_sparse_step=- mlp_only_layers=- router_aux_loss_coef=- partial_rotary_factor=0.5
  key     n_shared_experts=1 routed_scaling_factor=1.0 n_group=1 topk_group=1
  key     first_k_dense_replace=1 use_qk_norm=false num_nextn_predict_layers=1
  only    qk_layernorm=- rotary_percent=- moe_router_score=sigmoid moe_router_choice_bias=true
  only    moe_routed_scaling_factor=- moe_router_groups=- moe_layer_frequency=1 num_shared_experts=-
  biases  attention_bias=add_qkv_biases
  fp32    mlp.router=1

cohere2 Cohere2ForCausalLM llama
  key     vocab_size=256000 hidden_size=8192 num_hidden_layers=40 num_attention_heads=64
  key     head_dim=- intermediate_size=22528 max_position_embeddings=8192 logit_scale=0.0625
  key     tie_word_embeddings=true rms_norm_eps=- layer_norm_eps=1e-5 mlp_bias=-
  key     sliding_window=4096 layer_types=null
  full    every=4
  must    sliding_window_pattern=4 rope_interleaved=- use_embedding_sharing=true use_gated_activation=true
  must    use_parallel_block=true use_parallel_embedding=false use_qk_norm=false rotary_pct=1.0
  must    position_embedding_type=rope_gptj layer_switch=4
  must    order_of_interleaved_layers=local_attn_first
  only    normalization_type=layer_norm use_layer_norm_bias=false parallel_branches=one_norm
  only    logit_scale=- rotary_pattern=windows_alone
  rows    rotary=interleaved
"""
# Keys of config.json that are a single option by another name.
_OPTIONS = MappingProxyType(
    {
        key: option
        for option, *keys in map(
            str.split,
            """
            hidden_size              n_embd
            num_layers               num_hidden_layers n_layer
            num_attention_heads      n_head
            head_groups              num_key_value_heads
            kv_channels              head_dim
            ffn_hidden_size          intermediate_size n_inner
            activation_type          hidden_act activation_function hidden_activation
            max_position_embeddings  n_positions
            init_method_std          initializer_range
            attention_dropout        attn_pdrop
            hidden_dropout           residual_dropout resid_pdrop
            embedding_dropout        embd_pdrop
            layer_norm_eps           rms_norm_eps norm_epsilon layer_norm_epsilon norm_eps
            rotary_percent           partial_rotary_factor rotary_pct
            attention_softmax_in_fp32  reorder_and_upcast_attn
            embedding_scale          embedding_multiplier
            residual_scale           residual_multiplier
            attention_scale          attention_multiplier query_pre_attn_scalar
            logit_scale              logits_scaling
            logit_soft_cap           final_logit_softcapping
            attention_soft_cap       attn_logit_softcapping
            activation_limit         swiglu_limit
            qk_layernorm             use_qk_norm
            num_experts              num_local_experts n_routed_experts
            num_experts_per_token    num_experts_per_tok
            num_shared_experts       n_shared_experts
            moe_ffn_hidden_size      moe_intermediate_size
            moe_layer_frequency      decoder_sparse_step
            moe_first_dense_layers   first_k_dense_replace
            moe_normalize_top_k      norm_topk_prob
            moe_routed_scaling_factor  routed_scaling_factor
            moe_router_groups        n_group
            moe_router_top_groups    topk_group
            expert_auxiliary_loss_coefficient  router_aux_loss_coef
            """.strip().splitlines(),
        )
        for key in keys
    }
)
# Of these the option is a power.
POWERS = MappingProxyType({"query_pre_attn_scalar": -0.5, "logits_scaling": -1.0})
_BIASES = ("add_linear_biases", "add_qkv_biases", "add_mlp_biases")
# Most programs read these: an export takes another one only if asked to, or if none of these fits.
_WELL_KNOWN = ("llama", "mistral", "gpt2", "gpt_bigcode", "starcoder2", "qwen2", "qwen3")


def _value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return tuple(value) if isinstance(value, list) else value
    return text


@dataclass(frozen=True)
class Architecture:
    """One `model_type`; see `_FAMILIES`."""

    name: str
    class_name: str
    # Keys of config.json -> values if missing; includes keys that are no single option.
    defaults: JsonObject
    constants: Mapping[str, tuple[Any, ...]]  # key -> the only values that we can express
    switches: Mapping[str, tuple[str, str]]  # key -> an option and its value if true
    only: JsonObject  # our options that have one value by the table
    biases: Mapping[str, tuple[str, ...]]  # key -> the options that it states
    always_biased: tuple[str, ...]  # options of biases that every file has, perhaps as zeros
    full_every: int  # see `_FAMILIES`; 0: other keys say which blocks have a window
    names: dict[str, str]  # our modules in a block -> theirs, beside those in `weight_map`
    interleaved: bool  # files pair adjacent channels of a head for rotary positions
    # See `_FAMILIES`.
    transposed_experts: bool
    names_in_memory: Mapping[str, str]
    fp32: tuple[str, ...]
    options: Mapping[str, str]

    @property
    def fixed(self) -> JsonObject:
        """Our options that have only one value."""
        stated = {*self.always_biased, *itertools.chain(*self.biases.values())}
        absent: Options = {option: False for option in _BIASES if option not in stated}
        if "sliding_window" not in self.defaults:
            absent["window_size"] = None
        if "layer_types" not in self.defaults:
            absent["attention_pattern"] = ()
        plain = {
            option: value
            for option, value in self.only.items()
            if value not in ("width", "windows", "windows_alone")
        }
        return plain | absent

    @property
    def needs_window(self) -> bool:
        """Whether transformers computes a mask for the window even if no block has one."""
        says_by_types_alone = (
            "layer_types" in self.defaults and "use_sliding_window" not in self.defaults
        )
        return says_by_types_alone and self.only.get("rotary_pattern") != "windows"

    @property
    def rotates_windows(self) -> bool:
        """Whether only blocks with a window rotate, unless no block has one."""
        return self.only.get("rotary_pattern") == "windows" or self.never_rotates_others

    @property
    def never_rotates_others(self) -> bool:
        """Whether only blocks with a window rotate, even if no block has one."""
        return self.only.get("rotary_pattern") == "windows_alone"

    def embedding_scale(self, hidden_size: int) -> float | None:
        """Return the factor on embeddings that follows from the width; None: another one may be
        stated."""
        return hidden_size**0.5 if self.only.get("embedding_scale") == "width" else None

    @property
    def keys(self) -> dict[str, str]:
        """Map the keys of config.json that are a single option to that option."""
        options = {key: self.options.get(key, _OPTIONS.get(key, key)) for key in self.defaults}
        return {key: option for key, option in options.items() if option in FLAGS}

    def key_of(self, option: str) -> str:
        """Return the key of an option, or the option itself if no single key states it."""
        return next((key for key, name in self.keys.items() if name == option), option)


def _read_families(text: str) -> Iterator[Architecture]:
    """Yield the architectures of a table, in its order; see `_FAMILIES`."""
    cells: dict[str, dict[tuple[str, str], str]] = {}  # family -> line and key -> value
    for paragraph in text.strip().split("\n\n"):
        (name, class_name, *like), *lines = map(str.split, paragraph.splitlines())
        cells[name] = dict(cells[like[0]]) if like else {}
        for kind, *words in lines:
            for word in words:
                key, value = word.split("=")
                cells[name][kind, key] = value
        if name != "shared":
            yield _architecture(name, class_name, cells[name])


def _architecture(name: str, class_name: str, cells: Mapping[tuple[str, str], str]) -> Architecture:
    def line(kind: str) -> dict[str, str]:
        return {key: value for (its, key), value in cells.items() if its == kind and value != "-"}

    keys, only = (
        {key: _value(value) for key, value in line(kind).items()} for kind in ("key", "only")
    )
    constants = {key: tuple(map(_value, text.split("|"))) for key, text in line("must").items()}
    biases = {key: tuple(options.split(",")) for key, options in line("biases").items()}
    always = biases.pop("all", ())
    stated = {key: options for key, options in biases.items() if key in keys}
    parted = {key: text.partition(":") for key, text in line("true").items()}
    switches = {key: (option, value) for key, (option, _, value) in parted.items()}
    return Architecture(
        *(name, class_name, keys, constants, switches, only, stated, always),
        full_every=int(line("full").get("every", 0)),
        names=line("name"),
        interleaved="rotary" in line("rows"),
        transposed_experts="experts" in line("rows"),
        names_in_memory=line("memory"),
        fp32=tuple(line("fp32")),
        options=line("option"),
    )


# In order of preference for exports.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {architecture.name: architecture for architecture in _read_families(_FAMILIES)}
)


def biases_of(architecture: str, model: ModelConfig) -> Options:
    """Return the bias options of a model exported as this architecture: its own, and biases written
    as zeros."""
    table = ARCHITECTURES[architecture]
    found = {option: option in table.always_biased for option in _BIASES}
    for options in table.biases.values():
        found |= dict.fromkeys(options, any(getattr(model, option) for option in options))
    return found


def check_exportable(model: ModelConfig, model_type: str | None = None) -> str:
    """Return the `model_type` that expresses a resolved model, preferring the one with the fewest
    zero biases.

    Args:
        model_type: the requested one; None: any.

    Raises:
        UsageError: if no architecture can express the model; lists the flags that each would need.
    """
    needs = {architecture: _needs(architecture, model) for architecture in ARCHITECTURES}
    if model_type is not None:
        if not needs[model_type]:
            return model_type
        raise UsageError(
            f"--export_model_type={model_type} cannot express this model; leave the flag out, or train with the "
            f"flags that {ARCHITECTURES[model_type].class_name} needs: {', '.join(needs[model_type])}"
        )
    able = [architecture for architecture, missing in needs.items() if not missing]
    if able:
        return min(
            able, key=lambda name: (name not in _WELL_KNOWN, sum(biases_of(name, model).values()))
        )
    # for a model with experts, first those that have some
    nearest = sorted(
        needs.items(),
        key=lambda item: (
            any(need.startswith("--num_experts=1 ") for need in item[1]),
            len(item[1]),
        ),
    )
    raise UsageError(
        "--export_format=huggingface: no Hugging Face architecture can express this model. Use "
        "--export_format=distributed, leave out --export_interval, or train with the flags of one of these:\n  "
        + "\n  ".join(
            f"{ARCHITECTURES[name].class_name}: {', '.join(missing)}" for name, missing in nearest
        )
    )


def check_exports(config: Config) -> str | None:
    """Return the `model_type` for a resolved configuration's Hugging Face exports; None without
    any.

    Checks --export_model_type even without exports, because checkpoints store it for later
    conversions.

    Raises:
        UsageError: like `check_exportable`.
    """
    training = config.training
    exports = training.export_interval is not None or config.checkpoint.keep_best is not None
    exports = exports and training.export_format == "huggingface"
    if not exports and training.export_model_type is None:
        return None
    model_type = check_exportable(config.model, training.export_model_type)
    return model_type if exports else None


def _needs(architecture: str, model: ModelConfig) -> list[str]:
    """List the flags that the model would have to change, with the required values."""
    needs, table = [], ARCHITECTURES[architecture]
    note, model = ", with muP's factors" if model.mup else "", with_factors(model)
    for name, value in table.fixed.items():
        actual = getattr(model, name)
        assert actual is not None or FLAGS[name].optional, f"{name} is not resolved"
        if not allowed(value, actual):
            needs.append(f"--{name}={written(value)} (not {written(actual)}{note})")
    if table.rotates_windows and not all(
        model.rotates(block)
        == (window is not None or not (table.never_rotates_others or any(model.windows)))
        for block, window in enumerate(model.windows)
    ):
        needs.append("a --rotary_pattern that rotates blocks with a window alone")
    scale = table.embedding_scale(model.hidden_size)
    if scale not in (None, model.embedding_scale):
        needs.append(f"--embedding_scale={written(scale)} (not {written(model.embedding_scale)})")
    heads = model.num_attention_heads
    groups = model.head_groups
    channels = model.kv_channels
    width = model.hidden_size
    stated = table.keys.values()
    fewest = 1 if "multi_query" in table.defaults else heads
    if "head_groups" not in stated and groups not in (fewest, heads):
        needs.append(f"--head_groups={fewest} (not {groups})")
    if "kv_channels" not in stated and heads * channels != width:
        needs.append(
            f"--kv_channels * --num_attention_heads={heads} = --hidden_size={width} (not {channels})"
        )
    factor = model.attention_scale
    if "query_pre_attn_scalar" in table.defaults and factor is not None:
        if not base_of(factor, POWERS["query_pre_attn_scalar"]).is_integer():  # its type
            needs.append(
                f"1 / the root of a whole number as --attention_scale (not {written(factor)})"
            )
    if "num_experts" in stated and model.num_experts == 1:
        needs.append("--num_experts above 1")
    for option, value in table.switches.values():
        if (actual := getattr(model, option)) not in (value, FLAGS[option].default):
            needs.append(f"--{option}={value} (not {actual})")
    if architecture in ("llama", "gemma2", "gemma3_text") and width % heads:
        needs.append(f"a multiple of --num_attention_heads={heads} as --hidden_size (not {width})")
    return needs


def raised(value: float, power: float) -> float:
    """Return value ** power; infinity if it is too large for a float."""
    try:
        return value**power if power != 1.0 else value
    except OverflowError:
        return math.inf


def base_of(value: float, power: float) -> float:
    """Return the number of which a value is the power, without what powers lose at its end."""
    return float(f"{raised(value, 1 / power):.14g}")


def allowed(value: Any, actual: Any) -> bool:
    """Return whether a family has `actual`: a fixed value, or one of several, as in `a|b`."""
    return actual in value.split("|") if isinstance(value, str) else actual == value


def shown(value: Any) -> str:
    """Return a value of config.json, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:70] + "..."
