"""Bugs that were published elsewhere, planted into this program at run time.

    python -m tests.support.planted_bugs    writes their table into docs/reliability.md

A bug is a function of the package with a piece of its source replaced. `scripts/prove_layouts.py`
finds each in a minute, in layouts drawn for the options that stand beside it, or a default test
fails.
"""

import __future__

import importlib
import inspect
import re
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

from scripts.docs.tables import markdown_table, with_tables

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "reliability.md"


SHARED_OUT = (
    "--num_experts=4 --num_experts_per_token=2 --moe_ffn_hidden_size=24 --expert_parallel=2"
)


class Bug(NamedTuple):
    """A published bug. place: module:function of ours; before, after: in its source, however it is
    broken into lines.

    like: options with which the command finds it; empty: those that it draws. test: the test that
    finds it instead.
    """

    name: str
    what: str
    published: str
    place: str
    before: str
    after: str
    like: str = ""
    test: str = ""

    def plant(self) -> None:
        """Replace the code of the function; whoever has imported it runs the new one."""
        self.function().__code__ = self.mutated()

    def function(self) -> Any:
        """Return the function as it is."""
        module, _, path = self.place.partition(":")
        found: Any = importlib.import_module(f"megatron_lite.{module}")
        for part in path.split("."):
            found = getattr(found, part)
        return getattr(found, "__func__", found)

    def mutated(self) -> types.CodeType:
        """Return the function's code with the bug."""
        function = self.function()
        source = self._replaced(textwrap.dedent(inspect.getsource(function)))
        if "__class__" in function.__code__.co_freevars:  # it calls super()
            source = f"class Owner:\n{textwrap.indent(source, '    ')}"
        flags = __future__.annotations.compiler_flag
        code = compile(
            source, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True
        )
        while code.co_name != function.__name__:
            code = next(each for each in code.co_consts if isinstance(each, types.CodeType))
        return code

    def write_into(self, checkout: Path) -> None:
        """Write the bug into a copy of the checkout."""
        path = checkout / Path(inspect.getfile(self.function())).relative_to(ROOT)
        text, source = path.read_text("utf-8"), inspect.getsource(self.function())
        path.write_text(text.replace(source, self._replaced(source)), "utf-8")

    def _replaced(self, source: str) -> str:
        words = map(re.escape, re.findall(r"\w+|[^\w\s]", self.before))
        changed, count = re.subn(r"\s*".join(words), lambda _: self.after, source)
        assert count == 1, (self.name, count)
        return changed


BUGS = (
    # -- data parallelism, accumulation --
    Bug(
        "valid tokens",
        "gradients scaled by one rank's number of valid tokens",
        "torchtitan#2972",
        "outputs.step_inputs:step_inputs",
        "max(sum(counted), 1)",
        "max(sum(batch.counted for batch in micro_batches), 1)",
        like="--loss_mask=mask",
    ),
    Bug(
        "mean of means",
        "each micro-batch's mean has the same weight, however few tokens it counts",
        "transformers#34191",
        "outputs.step_inputs:step_inputs",
        "loss_weights(counted, run.config.training.loss_reduction)",
        'loss_weights(counted, "micro_mean")',
        like="--loss_mask=mask",
    ),
    Bug(
        "same data",
        "all data-parallel ranks read the same samples",
        "mistral#194",
        "data.loader:DataSource._requests",
        "split.piece(micro_step, self.rank)",
        "split.piece(micro_step, 0)",
    ),
    Bug(
        "shared gradient buffer",
        "gradients of earlier micro-batches lost where stages share a gradient buffer",
        "Fast-LLM#551",
        "zero.stage:Stage.reduce",
        "part.sums, again)",
        "part.sums, False)",
    ),
    Bug(
        "overwritten gradients",
        "the last micro-batch's gradient overwrites those before it",
        "DeepSpeed#7981",
        "kernels.linear:accumulate_product",
        "weight.begin_gradient()",
        "weight.begin_gradient() or True",
    ),
    Bug(
        "tied weights",
        "tied embeddings lose the gradient of one of their two uses",
        "Megatron-LM#844",
        "kernels.embedding:_Embedding.backward",
        "if ctx.weight.begin_gradient():",
        "if ctx.weight.begin_gradient() or True:",
        like="--tie_word_embeddings=1",
    ),
    Bug(
        "stale weights",
        "a layer computes before its weights have arrived",
        "Megatron-LM#950",
        "zero.stage:Stage.require_weights",
        "self.weights.wait()",
        "pass",
    ),
    # -- norm, clipping, displayed loss --
    Bug(
        "norm of replicas",
        "the gradient norm counts copies of a parameter once for each rank that holds it",
        "torchtitan#2318, RL#3788",
        "optimizer.optimizer:Optimizer.__init__",
        "for start, end in part.counted()",
        "for start, end in [(0, None)]",
    ),
    Bug(
        "norm of parts",
        "the gradient norm misses what other ranks hold",
        "Megatron-LM#5916",
        "optimizer.optimizer:Optimizer._sums_over_ranks",
        "return norm_squared, total",
        "return every[:-1].sum(), total",
    ),
    Bug(
        "loss of copies",
        "the displayed loss adds that of every tensor-parallel rank",
        "torchtitan#3329",
        "optimizer.optimizer:Optimizer._sums_over_ranks",
        "if self._distributed.tensor.rank == 0:",
        "if True:",
    ),
    # -- pipelines --
    Bug(
        "norm of stages",
        "the gradient norm is that of a rank's own pipeline stages",
        "torchtitan#596",
        "optimizer.optimizer:Optimizer._sums_over_ranks",
        "self._distributed.pipeline.sum_in_rank_order(own)",
        "own",
    ),
    Bug(
        "weight gradients twice",
        "backward passes in two parts count a weight's gradient twice",
        "pytorch#180952",
        "zero.stage:Stage.backward_weights",
        "self._later.pop(slot)",
        "2 * self._later.pop(slot)",
    ),
    Bug(
        "tokens of copies",
        "each rank with the same samples counts their tokens once more",
        "trl#7100",
        "outputs.step_inputs:counted_labels",
        "run.distributed.world_size // run.distributed.data.world_size",
        "1",
        like="--loss_mask=mask",
    ),
    # -- hybrid shards --
    Bug(
        "norm times replicas",
        "the gradient norm counts what each replica holds",
        "torchtitan#2318",
        "optimizer.optimizer:Optimizer.__init__",
        "part.grad_shard[start:end]",
        "part.sums[start:end]",
        like="--data_parallel_shard=2",
    ),
    Bug(
        "replicas drift",
        "gradients are not summed over replicas",
        "Automodel#3135",
        "zero.replica_shards:HybridStage._reduce_across",
        '[part.replicate.reduce_scatter(part.sums, "replica reduce") for part in self.trainable]',
        "[]",
        like="--data_parallel_shard=2",
    ),
    # -- tensor parallelism --
    Bug(
        "copies drift",
        "gradients of norms are those of a rank's own tokens",
        "gpt-neox#1257, Automodel#3135",
        "zero.replicas:Replicas.sum_gradients",
        "if not self._numel:",
        "if True:",
    ),
    Bug(
        "query and key norms",
        "gradients of query and key norms are those of a rank's own heads",
        "RL#3716",
        "model.tensor_parallel:TensorParallel.replicated",
        "inside or self.splits_tokens",
        "self.splits_tokens",
        like="--qk_layernorm=1",
    ),
    Bug(
        "one key head",
        "with fewer key heads than ranks, the gradient of a shared one is that of a rank's own queries",
        "bigcode-project/Megatron-LM#35",
        "model.tensor_parallel:TensorParallel.split",
        "sums_gradients=True",
        "sums_gradients=False",
        like="--head_groups=1",
    ),
    Bug(
        "bias of each rank",
        "each rank adds the bias of a product whose results are then summed",
        "Paddle#35186",
        "kernels.tensor_collectives:Replicated.reduced_product",
        "bias if self._group.rank == 0 else None",
        "bias",
        like="--random_bias_init=1",
    ),
    Bug(
        "initial parts",
        "each rank draws its own initial values",
        "OLMo-core#319",
        "zero.flat_shard:FlatShard.initialize",
        "derive_seed(seed, spec.name)",
        "derive_seed(seed, spec.name) + self.group.rank",
    ),
    Bug(
        "absent tokens",
        "a part of the vocabulary looks up tokens of other parts",
        "pytorch#131264",
        "kernels.embedding:_Embedding.forward",
        "if absent is not None:",
        "if absent is None and rows is None:",
    ),
    Bug(
        "padded vocabulary",
        "logits of padding rows take part in the loss",
        "unsloth#10616",
        "kernels.cross_entropy:_LinearCrossEntropy.forward",
        "min(end, vocab_size) - first",
        "end - first",
        like="--make_vocab_size_divisible_by=8",
    ),
    Bug(
        "own part of the vocabulary",
        "a sum over the vocabulary is one over a rank's part",
        "Megatron-LM#737",
        "kernels.tensor_collectives:SplitVocabulary.join",
        "torch.logsumexp(gathered[:, 0], dim=0, out=lse)",
        "pass",
        like="--logit_z_loss=0.01",
    ),
    Bug(
        "shifted labels",
        "labels are shifted after the tokens were split",
        "verl#4250",
        "kernels.tensor_collectives:Vocabulary.labels",
        "self._collectives.own(labels).flatten()",
        "self._collectives.own(labels).flatten().roll(-getattr(self._collectives, 'splits_tokens', False))",
        like="--parallel_embeddings=0",
    ),
    Bug(
        "positions from zero",
        "positions begin at zero on each rank that has a slice of the tokens",
        "Megatron-LM#5243",
        "kernels.tensor_collectives:SequenceParallel.positions",
        "return self.own(positions)",
        "return positions.flatten()[: positions.numel() // self._group.world_size].view(1, -1)",
        like="--use_rotary_embeddings=0",
    ),
    # -- expert parallelism --
    Bug(
        "norm without experts",
        "the gradient norm leaves out the experts",
        "Megatron-LM#5916, DeepSpeed#8613",
        "optimizer.optimizer:Optimizer.__init__",
        "part.grad_shard[start:end] for part in stage.trainable",
        "part.grad_shard[start:end] for part in stage.trainable[:1]",
        like=SHARED_OUT,
    ),
    Bug(
        "gradients times ranks",
        "an expert's gradient is multiplied by the number of ranks that share out the experts",
        "DeepSpeed#5259, Megatron-LM#5956",
        "kernels.experts:_Experts.backward",
        "scaled.mul_(score)",
        "scaled.mul_(score).mul_(1 + dispatch.sends)",
        like=SHARED_OUT,
    ),
    Bug(
        "experts drift",
        "gradients of experts are not summed over the ranks with the same ones",
        "fairseq#4220, Automodel#3135",
        "zero.stage:Stage.reduce",
        "part.group.reduce_scatter(part.full_gradients, part.reduce_kind)",
        "Works() if part.has_experts else part.group.reduce_scatter(part.full_gradients)",
        like=SHARED_OUT,
    ),
    Bug(
        "first experts",
        "each rank begins with the first ones",
        "DeepSpeed#6589",
        "tiles:Split.own_rows",
        "self.rank * self.expert_ranks // self.ranks * rows",
        "0",
        like=SHARED_OUT,
    ),
    Bug(
        "experts of one rank",
        "a checkpoint has one rank's experts in the place of all",
        "KempnerForge#202, Megatron-LM#1836",
        "checkpoint.writing:locate_parameters",
        "place[EXPERT_PARTS]",
        'place["tensor"]',
        test="tests/checkpoint/test_tensor_layouts.py::test_any_layout_resumes_any_other",
    ),
    # -- masks and documents --
    Bug(
        "no valid token",
        "a batch in which no token counts has a loss of NaN",
        "Automodel#3796, Megatron-LM#1764",
        "optimizer.optimizer:Optimizer.step",
        "loss / max(tokens, 1)",
        "loss / tokens",
        test="tests/train/test_loss_masks.py::test_where_no_label_counts_there_is_no_loss",
    ),
    Bug(
        "leak between documents",
        "packed documents attend to each other",
        "nanoVLM#204",
        "kernels.attention.attention:attention",
        "(s,) * b if documents is None else documents.lengths",
        "(s,) * b",
        test="tests/kernels/attention/test_attention.py::test_nothing_leaks_between_documents",
    ),
    Bug(
        "window",
        "a window is one token too large",
        "transformers#39408",
        "kernels.attention.blocks:blocks_of_a_document",
        "min(window or length, length)",
        "min((window or length) + 1, length)",
        test="tests/kernels/attention/test_attention.py::test_blocks_equal_the_formula",
    ),
    Bug(
        "norms decay",
        "weight decay shrinks the weights of norms",
        "Fast-LLM#545",
        "model.layer:Norm.__init__",
        "weights, weight_decay=0.0",
        "weights, weight_decay=1.0",
        test="tests/model/test_norm_layers.py::test_norms_are_vectors_that_do_not_decay",
    ),
    # -- recomputation and evaluation --
    Bug(
        "evaluations count",
        "an evaluation changes what training counts",
        "Megatron-LM#4148",
        "kernels.eight_bit:EightBit._scale",
        "if scale is not None and self._seed is None:",
        "if False:",
        test="tests/optimizer/test_delayed_scaling.py::"
        "test_an_iteration_counts_the_largest_of_its_micro_batches_and_no_evaluation",
    ),
    Bug(
        "frozen weights with moving scales",
        "a frozen weight that stays rounded takes the scale of another iteration",
        "TransformerEngine#1047",
        "kernels.eight_bit:EightBit._delayed_scale",
        "if self.delayed is None or (kind == WEIGHT and self.frozen):",
        "if self.delayed is None:",
        test="tests/optimizer/test_delayed_scaling.py::test_a_frozen_weight_has_its_own_scale_in_all_iterations",
    ),
    Bug(
        "recomputed from elsewhere",
        "the backward pass recomputes a layer from another input",
        "Megatron-LM#290",
        "zero.stage:Stage._run",
        "hidden = recompute(layer, hidden, micro_batch)",
        "first = hidden if layer is self.layers[0] else first; hidden = recompute(layer, first, micro_batch)",
    ),
    # -- resume --
    Bug(
        "samples again",
        "a resumed run reads the first samples again",
        "accelerate#4232",
        "data.loader:DataSource.batches",
        "range(first_iteration + 1, first_iteration + count + 1)",
        "range(1, count + 1)",
    ),
    Bug(
        "rate starts over",
        "the learning rate of a resumed run starts over",
        "nanotron#233",
        "train:train_step",
        "learning_rate(run.config, iteration,",
        "learning_rate(run.config, iteration - run.resumed.iteration,",
    ),
    Bug(
        "count of updates",
        "a resumed run corrects Adam's bias as in its first step",
        "DeepSpeed#4396",
        "optimizer.optimizer:Optimizer.load_rule",
        'state["updates"]',
        "0",
    ),
    Bug(
        "lost momentum",
        "Muon's momentum is not restored",
        "Megatron-LM#6920",
        "checkpoint.reading:_fill_shard",
        "if kind in MOMENTS and not is_kept:",
        "if kind in MOMENTS:",
        like="--optimizer=muon",
    ),
    Bug(
        "average starts over",
        "a resumed run starts its average of the weights again",
        "FastVideo#1440",
        "optimizer.averaging:Averaging.load_state",
        'if state.get("type") == self._config.ema_type:',
        "if False:",
        like="--ema_type=ema --ema_beta=0.5",
    ),
    Bug(
        "batch ramp starts over",
        "a resumed run starts its batch-size schedule again",
        "maxtext#2656",
        "data.loader:DataSource.batches",
        "split = self.split(phase, iteration)",
        "split = self.split(phase, iteration - first_iteration)",
        like="--batch_size_schedule=0:12,1:24",
    ),
    Bug(
        "recomputed tokens count",
        "tokens count for the balance again when a block is recomputed",
        "Megatron-LM#1593",
        "kernels.routing:_WithLosses.forward",
        "ctx.losses = losses",
        "ctx.losses = losses; losses.sums and losses.sums._counts.add_(chosen.numel())",
        test="tests/train/test_experts.py::test_evaluation_recomputation_and_padding_count_nothing",
    ),
    Bug(
        "sigmoid balance loss",
        "the balance loss takes a sigmoid router's scores, which sum to no 1",
        "Megatron-LM#1545",
        "model.experts:Router.forward",
        "shares = probabilities / probabilities.sum(1, keepdim=True)",
        "shares = probabilities",
        test="tests/train/test_against_torch.py::"
        "test_training_equals_plain_torch[experts in groups, one rank]",
    ),
    Bug(
        "accumulated balance loss",
        "the balance loss's coefficient is multiplied by the steps of accumulation",
        "transformers 5.24, Trainer",
        "outputs.step_inputs:step_inputs",
        "max(tokens, 1)",
        "max(tokens, 1) * len(micro_batches)",
        like="--num_experts=6 --num_experts_per_token=2 --moe_ffn_hidden_size=24 "
        "--expert_auxiliary_loss_coefficient=0.1",
    ),
    Bug(
        "router gradients",
        "gradients of scores are those of other choices",
        "transformers#48687",
        "kernels.experts:Rows.by_choice",
        "torch.empty_like(values).index_copy_(0, self._order, values)",
        "values",
        test="tests/kernels/test_experts.py::test_against_the_formula",
    ),
    Bug(
        "ties",
        "equal scores choose experts by no rule",
        "transformers 5.24",
        "kernels.routing:best",
        "values.sort(dim=1, descending=True, stable=True)[1][:, :count]",
        "values.topk(count, dim=1)[1]",
        test="tests/kernels/test_routing.py::test_ties_go_to_the_lowest_index",
    ),
    Bug(
        "scores not normalized",
        "the scores of chosen experts keep their sum",
        "llama.cpp, olmoe",
        "kernels.routing:Choice.scores",
        "if self.normalized:",
        "if False:",
        test="tests/kernels/test_routing.py::test_softmax_over_the_chosen_logits_is_normalization",
    ),
    Bug(
        "bias in the scores",
        "the choice bias is in the scores of outputs, too",
        "against arXiv:2408.15664",
        "model.experts:Router.forward",
        "self.choice.scores(probabilities, chosen)",
        "self.choice.scores(values.detach() + probabilities - probabilities.detach(), chosen)",
        test="tests/train/test_against_torch.py::"
        "test_training_equals_plain_torch[experts in groups, one rank]",
    ),
    Bug(
        "one rank's loads",
        "the balance depends on the layout: each data-parallel rank takes its own tokens",
        "megablocks#85",
        "optimizer.balance:Balance.end_step",
        "groups = self._distributed.data, self._distributed.pipeline",
        "groups = (self._distributed.pipeline,)",
        like="--num_experts=6 --num_experts_per_token=2 --moe_ffn_hidden_size=24",
    ),
)


def table() -> list[str]:
    """Return the lines of the guide's table."""
    command = "`prove_layouts.py`"
    rows = [
        (
            bug.what,
            bug.published,
            f"`{bug.test}`" if bug.test else f"{command}, `{bug.like}`" if bug.like else command,
        )
        for bug in BUGS
    ]
    return markdown_table(("bug", "published", "caught here by"), rows)


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text("utf-8"), {"planted": table}), "utf-8")
