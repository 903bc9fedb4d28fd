"""docs/flags.md is current and complete."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.flags import FLAGS
from megatron_lite.refused import REFUSED, REFUSED_VALUES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"

# Every flag of Fast-LLM's flat-flag era, as its dataclasses had them.
FAST_LLM_FLAGS = """
train_iters validation_iters validation_interval test_iters num_workers prefetch_factor export_callback_script
export_callback_env
batch_size micro_batch_size depth_first_micro_batches breadth_first_micro_batches sequential_micro_batches
sequence_length micro_sequence_length
lr lr_decay_style lr_decay_iters lr_decay_power lr_warmup_iters min_lr lr_schedule weight_decay adam_beta1 adam_beta2
adam_eps clip_grad loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis default_lr_scale
zero_stage layers_per_stage stages_per_pipeline_stage num_weight_buffers num_grad_buffers pipeline_delay
full_precision_gradients compile_all debug_layer_outputs debug_layer_gradients debug_param_init debug_param_gradients
debug_all_param_gradients debug_param_update debug_global_tensors debug_activation_memory debug_tensor_parallel
store_frozen_weights_in_optimization_precision
tensor_parallel pipeline_parallel sequence_tensor_parallel sequence_data_parallel world_size rank local_world_size
pipeline_first distributed_timeout seed training_dtype optimization_dtype reproducible_init dp_seed_shift pp_seed_shift
pp_gen_init_seed_shift pp_gen_seed_shift tp_seed_shift tp_gen_init_seed_shift tp_gen_seed_shift sample_seed_shift
train_seed_shift valid_seed_shift test_seed_shift
pipeline_overlap data_overlap throttle_cpu throttle_cpu_rate throttle_cpu_delay data_batch_warn_time_ms debug_schedule
debug_send_recv profile_schedule skip_step
num_layers hidden_size num_attention_heads head_groups kv_channels ffn_hidden_size vocab_size max_position_embeddings
use_position_embeddings tie_word_embeddings add_linear_biases gated activation_type use_rotary_embeddings
rotary_embedding_scale triton_rotary normalization_type layer_norm_eps zero_centered_normalization
normalization_implementation layer_norm_init_range transposed_mlp_weight init_method_std init_method_std_qkv
init_method_std_mlp_1 init_method_std_attn_proj init_method_std_mlp_2 init_method_std_embed attention_dropout
hidden_dropout full_precision_residual use_flash_attention window_size mlp_recompute_level cross_entropy_impl
cross_entropy_splits parallel_embeddings sequence_first logit_z_loss random_bias_init debug_transformer
debug_transformer_memory
num_experts num_shared_experts num_experts_per_token expert_routing_type dropless_moe dropless_dynamic_shape
expert_auxiliary_loss_coefficient expert_z_loss_coefficient moe_jitter_eps mlp_lr_scale router_lr_scale
experiment_dir experiment_name log_interval log_offset log_timestamps structured_logs enable_all_loggers
checkpoint_interval checkpoint_offset max_checkpoints export_interval stop_interval stop_offset wandb_group_name
wandb_project_name wandb_entity_name wandb_status_interval wandb_post_alerts torch_dynamo_enable enable_triton_kernels
triton_linear_kernels save_tensor_logs show_tensor_logs tensor_logs_show_elements
split dataset_source data_path data_sample_warn_time_ms multiprocessing_context tokenizer_file fim_rate
fim_max_middle_len fim_split_sample fim_fragment_rate fim_ignore_prefix fim_spm_rate fim_truncate_or_pad
pretrained_checkpoint_path pretrained_checkpoint_type imported_model_type use_pretrained_config
ignore_pretrained_config load_full_base_model_config load_full_fast_llm_config load_pretrained_weights
load_pretrained_optimizer
profile_cpu profile_cuda profile_skip profile_wait profile_warmup profile_cycles profile_averages profile_trace
profile_log profile_export profile_column_width profile_ranks
input_type output_type input_path output_path model_type use_cpu exist_ok target_params_per_file dtype layers_per_step
""".split()


def first_cells(text: str) -> list[str]:
    """The flags of all rows of the tables, without backticks and dashes."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `--")]
    return [row.strip("|` ").removeprefix("--") for row in rows]


def test_page_is_current() -> None:
    """The page is what the script writes."""
    command = [sys.executable, str(ROOT / "scripts" / "make_flags_table.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", FAST_LLM_FLAGS)
def test_every_flag_of_fast_llm_has_a_row(name: str) -> None:
    """It works, or is refused with a reason; never both, never neither."""
    refused = {entry.name: entry for entry in REFUSED}
    assert (name in FLAGS) != (name in refused)
    assert name in first_cells(PAGE.read_text("utf-8"))
    assert name in FLAGS or len(refused[name].reason) > 10


def test_page_has_every_option_once() -> None:
    """One row for each option, refused flag and refused value."""
    cells = first_cells(PAGE.read_text("utf-8"))
    assert len(cells) == len(set(cells))
    assert set(FLAGS) <= set(cells)
    assert {entry.name for entry in REFUSED} == set(FAST_LLM_FLAGS) - set(FLAGS)
    assert {f"{name}={value}" for name, value in REFUSED_VALUES} <= set(cells)
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 6, 7), line
