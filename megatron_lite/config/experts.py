"""Options of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.model import DenseConfig
from megatron_lite.config.option import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Rule,
    idle_unless,
    option,
)

SCORES = ("softmax", "sigmoid")
BALANCES = ("global", "sequence", "micro_batch")
UNROUNDED = (
    Rule("fp8=tensorwise|rowwise|delayed or int8", "experts have no products in 8 bits yet"),
)
BALANCED = (Rule("expert_routing_type=topk", "Sinkhorn's algorithm balances the load"),)
CHOICE_BIAS, UPDATE_RATE = (
    tuple(rule._replace(when=name) for rule in BALANCED)
    for name in ("moe_router_choice_bias", "moe_router_bias_update_rate")
)


# Options that have no effect unless another one has this value.
expert_option = idle_unless("num_experts!=1")
group_option = idle_unless("moe_router_groups!=1")


@dataclass
class ModelConfig(DenseConfig):
    """Model"""

    num_experts: int = option(
        1,
        "experts of an MLP, of which a router chooses some for each token; 1: no router",
        minimum=1,
        maximum=10_000,
        aliases="n_routed_experts",
        excludes=UNROUNDED,
    )
    num_experts_per_token: PositiveInt = expert_option(
        1,
        "experts that the router chooses for each token",
        aliases="num_experts_per_tok moe_router_topk",
    )
    num_shared_experts: NonNegativeInt = expert_option(
        0, "experts that compute every token, in addition to those that the router chooses"
    )
    moe_ffn_hidden_size: PositiveInt = expert_option(
        None,
        "width of each expert (of each half if gated)",
        unset="ffn_hidden_size",
        aliases="moe_intermediate_size",
    )
    moe_layer_frequency: PositiveInt = expert_option(
        1, "blocks N, 2 N, ..., counted from 1, have experts; the others have dense MLPs"
    )
    moe_first_dense_layers: NonNegativeInt = expert_option(
        0, "the first N blocks have dense MLPs", aliases="first_k_dense_replace"
    )
    expert_routing_type: str = expert_option(
        "topk",
        "how the router chooses experts in training; topk: those with the highest scores; sinkhorn: after "
        "Sinkhorn's algorithm has balanced the scores of the micro-batch",
        choices=("topk", "sinkhorn"),
    )
    moe_router_score: str = expert_option(
        "softmax",
        "a token's score for an expert, from the router's logits",
        choices=SCORES,
        aliases="moe_router_score_function",
    )
    moe_normalize_top_k: bool = expert_option(
        None,
        "divide a token's scores by the sum of the chosen ones",
        unset="num_experts_per_token > 1, because a single normalized score is 1 and teaches the router nothing",
        aliases="norm_topk_prob",
    )
    moe_routed_scaling_factor: PositiveFloat = expert_option(
        1.0,
        "factor on the scores of chosen experts, after they are normalized",
        aliases="routed_scaling_factor moe_router_topk_scaling_factor",
    )
    moe_router_groups: PositiveInt = expert_option(
        1,
        "divide the experts into N groups, and choose among those of the groups whose two best scores have the "
        "largest sums",
        aliases="n_group moe_router_num_groups",
        needs=BALANCED,
    )
    moe_router_top_groups: PositiveInt = group_option(
        1, "groups to choose experts from", aliases="topk_group moe_router_group_topk"
    )
    moe_router_bias: bool = expert_option(False, "add a bias to the router's logits")
    moe_router_choice_bias: bool = expert_option(
        None,
        "add to a token's scores, for the choice alone, a bias that balances the experts' loads (Wang et al. 2024, "
        "arXiv:2408.15664)",
        unset="moe_router_bias_update_rate",
        needs=CHOICE_BIAS,
    )
    moe_router_bias_update_rate: NonNegativeFloat = expert_option(
        None,
        "after each update, lower the choice bias of experts with more tokens than the mean by this, raise the others'",
        unset="0.001 with num_experts above 1 and expert_routing_type=topk, unless expert_auxiliary_loss_coefficient "
        "is set",
        needs=UPDATE_RATE,
    )
    expert_auxiliary_loss_coefficient: NonNegativeFloat = expert_option(
        None,
        "weight of the balance loss, experts * sum(share of tokens * mean probability), which is num_experts_per_token "
        "at balance",
        unset="0 with a moe_router_bias_update_rate or Sinkhorn's algorithm, else 0.01",
        aliases="router_aux_loss_coef moe_aux_loss_coeff",
    )
    moe_balance: str = expert_option(
        "global",
        "the tokens whose shares the balance loss takes; global: of the previous iteration's batch, the sum over "
        "blocks; sequence: of each sample, the sum over blocks; micro_batch: of each micro-batch, averaged over all "
        "blocks first, as transformers does, and so dependent on its size",
        choices=BALANCES,
    )
    expert_z_loss_coefficient: NonNegativeFloat = expert_option(
        0.0,
        "weight of the router's z-loss, mean(logsumexp(logits)^2), summed over blocks",
        aliases="moe_z_loss_coeff",
    )
    moe_jitter_eps: ProperFraction = expert_option(
        0.0,
        "multiply the router's inputs in training by random numbers between 1 - this and 1 + this",
        aliases="moe_input_jitter_eps router_jitter_noise",
    )

    def has_experts(self, block: int) -> bool:
        """Return whether a block's MLP has experts."""
        chosen = (
            block >= self.moe_first_dense_layers and (block + 1) % self.moe_layer_frequency == 0
        )
        return self.num_experts > 1 and chosen

    @property
    def expert_blocks(self) -> int:
        """Number of blocks with experts."""
        return sum(self.has_experts(block) for block in range(self.num_layers))

    @property
    def balances_micro_batches(self) -> bool:
        """Whether the balance loss takes the shares of each micro-batch."""
        return self.expert_auxiliary_loss_coefficient > 0 and self.moe_balance == "micro_batch"
