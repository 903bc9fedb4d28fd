"""Other programs' names and values of our options. Flags that do not exist here are in `cli/foreign_flags.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Names of the same option, with the same values, in Megatron-LM, Levanter or Hugging Face's Trainer.
OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "head_groups": ("num_key_value_heads", "num_kv_heads"),
        "kv_channels": ("head_dim",),
        "ffn_hidden_size": ("intermediate_size", "intermediate_dim"),
        "hidden_size": ("hidden_dim",),
        "num_attention_heads": ("num_heads",),
        "layer_norm_eps": ("layer_norm_epsilon",),
        "sequence_length": ("seq_len",),
        "micro_batch_size": ("per_device_train_batch_size",),
        "adam_beta1": ("beta1",),
        "adam_beta2": ("beta2",),
        "adam_eps": ("adam_epsilon", "epsilon"),
        "clip_grad": ("max_grad_norm",),
        "update_rms_clip": ("update_rms_clipping",),
        "logit_z_loss": ("z_loss_weight",),
        "full_precision_gradients": ("accumulate_allreduce_grads_in_fp32",),
        "deterministic": ("deterministic_mode",),
        "train_iters": ("num_train_steps",),
        "validation_interval": ("steps_per_eval",),
        "stop_interval": ("exit_interval",),
        "wandb_entity_name": ("wandb_entity",),
        "wandb_project_name": ("wandb_project",),
        "wandb_group_name": ("wandb_group",),
        "experiment_name": ("wandb_exp_name",),
    }
)

# Values of our options that other programs have, or that a user may well try, and what to write instead.
REFUSED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("dataset_source", "file"): "a JSON file cannot describe a blend yet; "
        "write the weights and prefixes: --data_path 0.3 first 0.7 second",
        ("dataset_source", "sample"): "the sample data set does not exist; write random for made-up tokens",
        ("mlp_recompute_level", "offload"): "activations are not moved to host memory; write activation or full",
        ("mlp_recompute_level", "nested"): "write full, or --recompute_layers=<N> for whole blocks",
        ("mlp_recompute_level", "recompute"): "write activation or full, or --recompute_layers=<N> for whole blocks",
        **{
            ("lr_schedule", style): f"takes a list of stages; for Levanter's lr_schedule write --lr_decay_style={name}"
            for style, name in (
                *((same, same) for same in ("constant", "linear", "cosine", "inv_sqrt", "inv")),
                ("power", "power_tokens"),
            )
        },
        ("clip_grad", "none"): "write 0, which turns clipping off",
        ("pretrained_checkpoint_type", "state_dict"): "pickles are never loaded; write the weights as safetensors",
        ("validation_iters", "none"): "write all for the whole validation set, 0 for no validation",
        ("weight_decay_default_mask", "true"): "write levanter",
        ("weight_decay_default_mask", "false"): "write off, or leave the flag out beside --weight_decay_modules",
        (
            "zero_stage",
            "0",
        ): "strictly worse: a full optimizer state on every rank costs memory and slows the update; write 1",
    }
)
