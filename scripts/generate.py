"""Continue a text with an exported model: a folder with config.json, model.safetensors and tokenizer.json.

    python scripts/generate.py --model experiments/mine/export/1000 --prompt "Once upon a time" --temperature 0.8

The model is the one that was trained (`megatron_lite/gpt.py`); transformers is not needed. Each new token costs a pass
over the whole text, which is short work for the small models that this is for; serve large ones with something else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lite.checkpoint.huggingface import convert
from megatron_lite.config import BatchConfig, Config, DataConfig, ModelConfig
from megatron_lite.data.tokenizing import load_tokenizer
from megatron_lite.errors import CheckpointError, DataError, RunError
from megatron_lite.gpt import build_gpt
from megatron_lite.kernels.choice import Kernels
from megatron_lite.layers.ends import Head
from megatron_lite.layers.layer import Layer, MicroBatch
from megatron_lite.parameter import Parameter
from megatron_lite.validation import resolve

ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact", "silu": "silu", "relu": "relu",
    "relu2": "squared_relu", "linear": "identity",
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: if there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; --model is the folder of an export") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def model_config(path: Path, names: set[str]) -> tuple[str, ModelConfig]:
    """The architecture and the resolved model that a config.json describes; `names` are those of its tensors.

    Raises:
        CheckpointError: if it is not a model of ours.
    """
    content = read_json(path)
    architecture = content.get("model_type")
    try:
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", "default")
        if architecture not in ("llama", "mistral", "gpt2", "starcoder2") or rope_type != "default":
            raise CheckpointError(f"{path}: no export of this program (model_type={architecture}, rope {rope_type})")
        if architecture == "gpt2":
            values = _gpt2_values(content)
        else:
            theta = float(rope.get("rope_theta") or content.get("rope_theta") or 10000.0)
            values = _rotary_values(content) | {"rotary_embedding_scale": -math.log(theta)}
            values["gated"] = architecture != "starcoder2"
            values["normalization_type"] = "layer_norm" if architecture == "starcoder2" else "rms_norm"
            values["window_size"] = None if architecture == "llama" else content.get("sliding_window")
        model = ModelConfig(
            vocab_size=content["vocab_size"],
            tie_word_embeddings="lm_head.weight" not in names,
            add_linear_biases=any(name.endswith(("o_proj.bias", "c_proj.bias")) for name in names),
            **values,
        )
        whole = Config(model=model, batch=BatchConfig(sequence_length=1), data=DataConfig(dataset_source="random"))
        return architecture, resolve(whole, 1).model
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a model: {type(error).__name__}: {error}") from None


def _gpt2_values(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": content["n_layer"], "hidden_size": content["n_embd"], "num_attention_heads": content["n_head"],
        "ffn_hidden_size": content.get("n_inner"), "max_position_embeddings": content["n_positions"],
        "activation_type": ACTIVATIONS[content["activation_function"]],
        "layer_norm_eps": content["layer_norm_epsilon"],
    }  # fmt: skip


def _rotary_values(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": content["num_hidden_layers"], "hidden_size": content["hidden_size"],
        "num_attention_heads": content["num_attention_heads"], "head_groups": content["num_key_value_heads"],
        "kv_channels": content.get("head_dim"), "ffn_hidden_size": content["intermediate_size"],
        "max_position_embeddings": content["max_position_embeddings"], "use_rotary_embeddings": True,
        "activation_type": ACTIVATIONS[content["hidden_act"]],
        "layer_norm_eps": content["rms_norm_eps" if "rms_norm_eps" in content else "norm_epsilon"],
    }  # fmt: skip


class Weights:
    """The tensors of an export by name, read one at a time.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.exists():
            files = sorted({Path(str(name)).name for name in read_json(index).get("weight_map", {}).values()})
        self._readers: dict[str, Any] = {}
        for path in (folder / name for name in files):
            try:
                reader = safe_open(path, framework="pt")
                self._readers.update(dict.fromkeys(reader.keys(), reader))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {path}: {error}; export the model again") from None
        self.names = set(self._readers)

    def copy_into(self, name: str, target: Tensor) -> None:
        """Fill `target` with a tensor."""
        try:
            source = self._readers[name].get_tensor(name)
        except KeyError:
            raise CheckpointError(f"the export lacks the tensor {name}") from None
        if source.shape != target.shape:
            raise CheckpointError(f"{name} has the shape {tuple(source.shape)}; config.json says {tuple(target.shape)}")
        target.copy_(source)


def load_model(folder: Path, length: int, device: torch.device) -> tuple[ModelConfig, list[Layer]]:
    """The model of an export for texts of up to `length` tokens, in fp32 on CPU and in the export's dtype on a GPU.

    Raises:
        CheckpointError: if the folder is no whole export of ours.
    """
    weights = Weights(folder)
    architecture, config = model_config(folder / "config.json", weights.names)
    # By the formula: a GPU's fused attention may plan anew for every length, and a text grows token by token.
    layers = build_gpt(config, length, Kernels(attention="math"))
    unused = set(weights.names)
    for module in (module for layer in layers for module in layer.modules()):
        for attribute, declared in list(module.named_parameters(recurse=False)):
            assert isinstance(declared, Parameter)
            values = torch.empty(declared.shape)
            # `convert` gives views of our parameter under the names of the architecture: filling them fills it.
            for name, view in convert(declared.spec.name, values, architecture, config):
                weights.copy_into(name, view)
                unused.discard(name)
            setattr(module, attribute, torch.nn.Parameter(values, requires_grad=False))
    if unused:
        raise CheckpointError(f"the export has tensors of another kind of model: {', '.join(sorted(unused)[:3])}")
    dtype = getattr(torch, str(read_json(folder / "config.json").get("dtype", "float32")))
    for layer in layers:
        layer.to(device, torch.float32 if device.type == "cpu" else dtype)
    return config, layers


@torch.no_grad()
def generate(
    layers: list[Layer], tokens: Sequence[int], limit: int, temperature: float, top_k: int | None, seed: int
) -> Iterator[int]:
    """Token after token, each drawn from softmax(logits / temperature) of the last `limit` tokens; endless.

    Temperature 0 takes the most probable token; `top_k` draws among that many.
    """
    head = layers[-1]
    assert isinstance(head, Head)
    device = head.weight.device
    generator = torch.Generator().manual_seed(seed % 2**63)
    text = torch.tensor([list(tokens)], device=device)
    while True:
        text = text[:, -limit:]
        micro_batch = MicroBatch(text, text)
        hidden = None
        for layer in layers[:-1]:
            hidden = layer(hidden, micro_batch)
        assert hidden is not None
        logits = head.logits(hidden[:, -1])[0].float().cpu()  # (v,)
        if temperature == 0.0:
            token = logits.argmax()
        else:
            scaled = (logits - logits.max()).double() / temperature  # the largest is 0 however cold it gets
            if top_k is not None:
                scaled[scaled < scaled.topk(min(top_k, len(scaled))).values[-1]] = -math.inf
            token = torch.multinomial(scaled.softmax(0), 1, generator=generator)[0]
        yield int(token)
        text = torch.cat((text, token.to(device).view(1, 1)), dim=1)


def continue_text(options: argparse.Namespace) -> str:
    """The prompt and its continuation, up to the end of the document or --max_new_tokens.

    Raises:
        RunError: of the kind that says what is wrong with the folder or the prompt.
    """
    if not (options.model / "tokenizer.json").is_file():
        raise DataError(f"{options.model} has no tokenizer.json; train with --tokenizer_file to export one")
    tokenizer = load_tokenizer(str(options.model))
    prompt = options.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    tokens = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, layers = load_model(options.model, len(tokens) + options.max_new_tokens, device)
    assert config.max_position_embeddings is not None
    if max(tokens) >= config.vocab_size:
        raise DataError(f"token {max(tokens)} of the prompt is beyond the model's vocabulary of {config.vocab_size}")
    new = []
    drawn = generate(
        layers, tokens, config.max_position_embeddings, options.temperature, options.top_k, options.seed
    )
    for token, _ in zip(drawn, range(options.max_new_tokens), strict=False):
        if token == tokenizer.end_of_document:
            break
        new.append(token)
    return tokenizer.decode([*tokens, *new])


def _at_least(minimum: float, kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {minimum}")
        return value

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text; returns the exit code."""
    parser = argparse.ArgumentParser(description="Continue a text with an exported model.", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder of an export")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max_new_tokens", type=_at_least(1, int), default=64, help="(default: 64)")
    parser.add_argument("--temperature", type=_at_least(0, float), default=1.0, help="0: most probable (default: 1)")
    parser.add_argument("--top_k", type=_at_least(1, int), help="draw among this many tokens (default: all)")
    parser.add_argument("--seed", type=_at_least(0, int), default=1234, help="(default: 1234)")
    options = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(continue_text(options))
    except RunError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
