"""Rules for a mixture of experts."""

from __future__ import annotations

from megatron_lite.config import Draft
from megatron_lite.validation.rules import Problems, fill

UPDATE_RATE, LOSS_COEFFICIENT = 1e-3, 0.01
MOST_EXPERTS = 200_000  # whose matrices are listed one by one


def experts(draft: Draft) -> Problems:
    """Check the router's choice, and choose how to balance the experts' loads."""
    count, chosen = draft.num_experts, draft.num_experts_per_token
    fill(draft, moe_ffn_hidden_size=draft.ffn_hidden_size, moe_normalize_top_k=chosen > 1)
    balances = count > 1 and draft.expert_routing_type == "topk"
    by_loss = draft.expert_auxiliary_loss_coefficient is not None
    by_loss = by_loss or draft.moe_router_choice_bias is False
    fill(draft, moe_router_bias_update_rate=UPDATE_RATE if balances and not by_loss else 0.0)
    by_bias = draft.moe_router_bias_update_rate > 0
    fill(draft, moe_router_choice_bias=by_bias)
    coefficient = LOSS_COEFFICIENT if balances and not by_bias else 0.0
    fill(draft, expert_auxiliary_loss_coefficient=coefficient)
    if by_bias and not draft.moe_router_choice_bias:
        rule = "there is no bias to update; leave one of the two out"
        yield "moe_router_bias_update_rate moe_router_choice_bias", rule
    if count == 1:
        return
    if chosen > count:
        rule = f"a token chooses at most all experts; write --num_experts_per_token={count} or less"
        yield "num_experts_per_token num_experts", rule
    if draft.expert_blocks * count > MOST_EXPERTS:
        rule = f"all blocks together have at most {MOST_EXPERTS:,} experts"
        yield "num_experts num_layers", rule
    if not draft.expert_blocks:
        rule = "no block would have experts; write smaller numbers, or --num_experts=1"
        yield "moe_layer_frequency moe_first_dense_layers num_layers", rule, "num_experts"
    yield from _groups(draft)


def _groups(draft: Draft) -> Problems:
    """Check the groups of experts."""
    groups, kept = draft.moe_router_groups, draft.moe_router_top_groups
    count = draft.num_experts
    if groups == 1:
        return
    if count % groups or count == groups:
        rule = "each group has equally many experts, and two or more; write another --moe_router_groups"
        yield "moe_router_groups num_experts", rule
    elif kept > groups:
        rule = f"there are {groups} groups; write at most --moe_router_top_groups={groups}"
        yield "moe_router_top_groups moe_router_groups", rule
    elif draft.num_experts_per_token > kept * (count // groups):
        rule = f"{kept} of {groups} groups have {kept * (count // groups)} experts; keep more groups, or choose fewer"
        yield "num_experts_per_token moe_router_top_groups moe_router_groups", rule, "num_experts"
