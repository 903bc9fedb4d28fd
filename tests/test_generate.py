"""scripts/generate.py: the tokens that transformers would generate, from the same folder, and clear errors."""

import dataclasses
import importlib.util
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.architectures import hugging_face_config
from megatron_lite.config import BatchConfig, Config, DataConfig, ModelConfig
from megatron_lite.data.tokenizing import save_byte_tokenizer
from megatron_lite.validation import resolve

SCRIPT = Path(__file__).parents[1] / "scripts" / "generate.py"
VOCABULARY = 257  # the byte tokenizer's
PROMPT = "def f("
ROTARY = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=40, initializer_range=0.3,
)  # fmt: skip
CASES = {
    "llama": ("Llama", ROTARY | dict(tie_word_embeddings=False)),
    "llama, tied, biases": ("Llama", ROTARY | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "mistral, window": ("Mistral", ROTARY | dict(sliding_window=7, head_dim=16)),
    "starcoder2": ("Starcoder2", ROTARY | dict(use_bias=True, sliding_window=None)),
    "gpt2": ("GPT2", dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=40,
                          initializer_range=0.3)),
}  # fmt: skip


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_model(folder, name, options):
    """A random model of transformers', with values large enough that the most probable token is clear."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{name}Config")(**options, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config).eval()
    with torch.no_grad():  # biases and norms that start at 0 and 1 would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_byte_tokenizer(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    save_model(folder, *CASES["llama"])
    return folder


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case, tmp_path, script):
    model = save_model(tmp_path, *CASES[case])
    tokens = list(PROMPT.encode())
    expected = model.generate(torch.tensor([tokens]), max_new_tokens=25, do_sample=False)[0, len(tokens) :].tolist()
    config, layers = script.load_model(tmp_path, 40, torch.device("cpu"))
    generated = script.generate(layers, tokens, config.max_position_embeddings, 0.0, None, 0)
    assert list(itertools.islice(generated, 25)) == expected
    assert len(set(expected)) > 5, "a text of few tokens proves little"


@pytest.mark.parametrize(
    "options",
    [
        dict(use_rotary_embeddings=True, gated=True, normalization_type="rms_norm", add_linear_biases=False),
        dict(use_rotary_embeddings=True, gated=True, normalization_type="rms_norm", tie_word_embeddings=False,
             rotary_embedding_scale=-math.log(500_000), head_groups=2, kv_channels=24, activation_type="relu"),
        dict(use_rotary_embeddings=True, gated=True, normalization_type="rms_norm", add_linear_biases=False,
             window_size=5),
        dict(use_rotary_embeddings=True, window_size=9, layer_norm_eps=1e-3, activation_type="gelu_exact"),
        dict(max_position_embeddings=100, ffn_hidden_size=50, activation_type="squared_relu"),
    ],
)  # fmt: skip
def test_our_exports_describe_the_model_that_was_trained(options, tmp_path, script):
    model = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=99, **options)
    data = DataConfig(dataset_source="random")
    config = resolve(Config(model=model, batch=BatchConfig(sequence_length=100), data=data), 1)
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(config, {})))
    names = {"c_proj.bias"} if config.model.add_linear_biases else set()
    names |= set() if config.model.tie_word_embeddings else {"lm_head.weight"}
    _, found = script.model_config(tmp_path / "config.json", names)
    assert dataclasses.replace(found, max_position_embeddings=None) == dataclasses.replace(
        config.model, max_position_embeddings=None, rotary_embedding_scale=found.rotary_embedding_scale
    )
    if model.use_rotary_embeddings:
        assert found.rotary_embedding_scale == pytest.approx(config.model.rotary_embedding_scale, rel=1e-12)
    assert found.max_position_embeddings >= 100


def test_beyond_the_longest_text_the_oldest_tokens_are_forgotten(export, script):
    config, layers = script.load_model(export, 8, torch.device("cpu"))
    first = list(itertools.islice(script.generate(layers, [9] * 50 + [1, 2, 3, 4], 4, 0.0, None, 0), 20))
    second = list(itertools.islice(script.generate(layers, [1, 2, 3, 4], 4, 0.0, None, 0), 20))
    assert first == second


def test_draws_repeat_with_the_seed_and_stay_within_top_k(export, script):
    _, layers = script.load_model(export, 64, torch.device("cpu"))

    def draw(temperature, top_k, seed):
        return list(itertools.islice(script.generate(layers, [1, 2, 3], 40, temperature, top_k, seed), 20))

    assert draw(1.0, None, 1) == draw(1.0, None, 1) != draw(1.0, None, 2)
    assert draw(5.0, 1, 1) == draw(0.0, None, 2)  # the best one of one
    assert draw(1.0, 10_000, 1) == draw(1.0, None, 1)


def test_command_prints_prompt_and_continuation(export, script, capsys):
    arguments = ["--model", str(export), "--prompt", PROMPT, "--max_new_tokens", "5", "--seed", "3", "--top_k=20"]
    assert script.main(arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith(PROMPT) and len(first) > len(PROMPT) + 1
    assert script.main(arguments) == 0 and capsys.readouterr().out == first
    assert script.main(["--model", str(export), "--prompt", "", "--max_new_tokens", "2"]) == 0


def test_text_ends_at_the_end_of_document(export, script, monkeypatch, capsys):
    monkeypatch.setattr(script, "generate", lambda *_: iter([72, 105, 256, 72, 105]))
    assert script.main(["--model", str(export), "--prompt", "Oh, "]) == 0
    assert capsys.readouterr().out == "Oh, Hi\n"


@pytest.mark.parametrize(
    "damage, code, fact",
    [
        (lambda folder: shutil.rmtree(folder), 3, "no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), 3, "--tokenizer_file"),
        (lambda folder: (folder / "config.json").unlink(), 4, "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), 4, "is not JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), 4, "model_type=bert"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), 4, "does not describe a model"),
        (lambda folder: (folder / "model.safetensors").unlink(), 4, "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), 4, "model.safetensors"),
        (lambda folder: edit(folder, num_hidden_layers=3), 4, "lacks the tensor model.layers.2"),
        (lambda folder: edit(folder, num_hidden_layers=1), 4, "tensors of another kind of model"),
        (lambda folder: edit(folder, intermediate_size=47), 4, "has the shape"),
    ],
)
def test_damage_ends_in_one_clear_line(export, script, tmp_path, capsys, damage, code, fact):
    folder = tmp_path / "copy"
    shutil.copytree(export, folder)
    damage(folder)
    assert script.main(["--model", str(folder), "--prompt", "x"]) == code
    error = capsys.readouterr().err
    assert fact in error and error.startswith("ERROR: ") and error.count("\n") == 1


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("flag", ["--temperature=-1", "--temperature=nan", "--max_new_tokens=0", "--top_k=x"])
def test_wrong_numbers_are_usage_errors(script, flag):
    with pytest.raises(SystemExit) as error:
        script.main(["--model", "x", "--prompt", "x", flag])
    assert error.value.code == 2
