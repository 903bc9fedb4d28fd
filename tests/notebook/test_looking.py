"""`megatron_lite.load`: what it shows is what transformers computes, and what `evaluate` and
`generate` print."""

import json
from pathlib import Path

import pytest
import torch

import megatron_lite
from megatron_lite.commands import evaluate, generate
from megatron_lite.errors import DataError, UsageError
from tests.support.light_imports import heavy_imports
from tests.support.threads import THREADS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEXT = "To be, or not to be: zoë 🎉"
LENGTH = 16  # of the model's samples, less than the text has tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers over bytes, with large weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, initializer_range=0.5)
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=257, eos_token_id=256, bos_token_id=256, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> megatron_lite.Model:
    return megatron_lite.load(folder, tokenizer_file="byte", device="cpu")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> torch.nn.Module:
    found: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return found


@torch.no_grad()
def test_numbers_are_those_of_transformers(
    model: megatron_lite.Model, oracle: torch.nn.Module
) -> None:
    """Logits, the loss of each token of a text of several samples, and the most probable tokens."""
    ids = list(TEXT.encode())
    assert model.tokenizer.encode(TEXT) == ids and len(ids) > LENGTH
    logits = oracle(torch.tensor([ids[:LENGTH]])).logits[0]
    torch.testing.assert_close(model.logits(ids[:LENGTH]), logits, rtol=1e-5, atol=1e-5)
    expected = list[float]()
    for start in range(0, len(ids) - 1, LENGTH):
        part = torch.tensor(ids[start : start + LENGTH + 1])
        ways = oracle(part[None, :-1]).logits[0].log_softmax(-1)
        expected += (-ways[torch.arange(len(part) - 1), part[1:]]).tolist()
    found = model.token_losses(TEXT)
    assert [row.id for row in found] == ids[1:]
    assert [row.loss for row in found] == pytest.approx(expected, rel=1e-5)
    assert "".join(row.token for row in found).startswith("o be, or not to be: zo")
    assert model.loss(TEXT) == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert model.token_losses(ids) == found
    values, order = oracle(torch.tensor([ids[:9]])).logits[0, -1].softmax(0).topk(4)
    tokens = model.next_tokens(TEXT[:9], k=4)
    assert [row.id for row in tokens] == order.tolist()
    assert [row.probability for row in tokens] == pytest.approx(values.tolist(), rel=1e-5)


def test_texts_and_losses_are_those_of_the_commands(
    model: megatron_lite.Model,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`generate` with the same options; `evaluate --per_token`, which adds the end of the document,
    and its loss is the mean of what it prints."""
    options = (f"--model={folder}", "--tokenizer_file=byte", "--device=cpu")
    words = ("--prompt=To be", "--max_new_tokens=8", "--top_k=40", "--seed=5", "--json_lines")
    assert generate.main([*options, *words]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert model.generate("To be", 8, top_k=40, seed=5) == text
    (tmp_path / "text.txt").write_text(TEXT)
    own = model.token_losses([*TEXT.encode(), 256])
    evaluated = [*options, f"--text={tmp_path / 'text.txt'}", f"--sequence_length={LENGTH}"]
    assert evaluate.main([*evaluated, "--per_token", "--json", "--micro_batch_size=2"]) == 0
    *rows, record = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["token"], row["id"]) for row in rows] == [row[:2] for row in own]
    losses = [row["loss"] for row in rows]
    assert losses == pytest.approx([row.loss for row in own], rel=1e-5)
    assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert evaluate.main([*evaluated, "--json"]) == 0
    assert record["loss"] == pytest.approx(json.loads(capsys.readouterr().out)["loss"], rel=1e-5)
    assert evaluate.main([*evaluated, "--per_token"]) == 0
    first = capsys.readouterr().out.splitlines()[0].split()
    assert first == [f"{losses[0]:.4f}", str(ord("o")), '"o"']
    with pytest.raises(SystemExit):
        evaluate.main([*evaluated, "--per_token", "--model", str(folder), str(folder)])
    assert "argument --per_token: give one --model" in capsys.readouterr().err


def test_errors_are_exceptions_and_threads_stay(model: megatron_lite.Model, folder: Path) -> None:
    """Each names its rule; a small model gives torch its threads back."""
    torch.set_num_threads(3)
    try:
        model.loss(TEXT)
        model.next_tokens("")
        megatron_lite.load(folder, tokenizer_file="byte", device="cpu").generate("x", 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(THREADS)
    for call, kind, said in (
        (lambda: model.loss("x"), DataError, "a text needs two tokens"),
        (lambda: model.logits([]), DataError, "0 ids; give 1 to 16"),
        (lambda: model.logits([300]), DataError, "token 300: the model's vocabulary has 257"),
        (lambda: model.loss([-1, 5]), DataError, "token -1"),
        (lambda: model.next_tokens("x" * 20), DataError, "the prompt 'xxxx.* has 20 tokens"),
        (lambda: model.generate("x", temperature=-1.0), UsageError, "temperature"),
        (lambda: model.generate("x", top_k=0), UsageError, "top_k >= 1"),
        (lambda: model.generate("x", stop="y"), UsageError, "stop: a list"),
        (lambda: model.next_tokens("x", k=0), UsageError, "k=0: write a number of at least 1"),
        (lambda: megatron_lite.load(folder, sequence_length=0), UsageError, "length=0: write"),
        (lambda: megatron_lite.load(folder, weights="auto"), UsageError, "'auto': choose"),  # type: ignore[arg-type]
        (
            lambda: megatron_lite.load(folder, device="gpu"),
            UsageError,
            "'gpu': choose from .'auto', 'cpu'",
        ),  # type: ignore[arg-type]
        (lambda: megatron_lite.load(folder), DataError, "name one with --tokenizer_file"),
        (lambda: megatron_lite.load("nowhere"), ValueError, "nowhere"),
    ):
        with pytest.raises(kind, match=said):
            call()


def test_the_package_is_imported_at_once() -> None:
    """`import megatron_lite` and `train` take no torch; the name `train` stays the function."""
    import megatron_lite.train
    from megatron_lite.notebook.training import train

    assert megatron_lite.train is train
    assert {"Model", "Result", "load", "train"} <= set(dir(megatron_lite))
    assert not heavy_imports("import megatron_lite; megatron_lite.train; megatron_lite.Result")
