"""scripts/generate.py: what it prints for prompts of every kind, from every kind of folder, and
clear errors."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.commands import generate as script
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import OutOfMemoryError
from megatron_lite.generation import writer
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.token_files import save_byte_tokenizer

PROMPTS = ("def f(", "a", "the quick brown fox", "a")
MODEL = dict(
    vocab_size=257,
    sequence_length=64,
    max_position_embeddings=64,
    head_groups=2,
    init_method_std=0.4,
    window_size=9,
) | dict(
    use_rotary_embeddings=True, gated=True, normalization_type="rms_norm", add_linear_biases=False
)


def save_model(distributed: Distributed, folder: str) -> None:
    """A short run leaves both: the checkpoint of its last iteration, and an export."""
    run = dict(
        train_iters=1, lr=1e-6, lr_warmup=0, experiment_dir=f"{folder}/run", export_interval=1
    )
    options = MODEL | run | {"tokenizer_file": f"{folder}/tokenizer.json"}
    train_whole(distributed, tiny_config(distributed.world_size, **options))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(str(folder / "tokenizer.json"))
    run_distributed(1, save_model, str(folder))
    return folder / "run"


@pytest.fixture(scope="module")
def export(run: Path) -> Path:
    return run / "export" / "1"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The script in this process: exit code, standard output, standard error."""

    def start(*arguments: Any) -> tuple[int, str, str]:
        code = script.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return start


def objects(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def repeated(values: tuple[str, ...]) -> list[str]:
    return [f"--prompt={value}" for value in values]


def test_greedy_texts_are_those_of_transformers_on_the_export(
    export: Path, call: Callable[..., Any]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    options = ("--temperature=0", "--max_new_tokens=30", "--json_lines", "--batch_size=2")
    code, output, _ = call("--model", export, *repeated(PROMPTS), *options)
    assert code == 0
    for line, prompt in zip(objects(output), PROMPTS, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        expected = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)
        expected = expected[0, inputs["input_ids"].shape[1] :].tolist()
        found = line["tokens"] + [256] * (line["finish"] == "end")
        assert (line["prompt"], found) == (prompt, expected)
        assert line["prompt_tokens"] == len(prompt)
        assert line["text"].encode() == bytes(line["tokens"]).decode(errors="replace").encode()
    assert len({token for line in objects(output) for token in line["tokens"]}) > 10, (
        "few tokens prove little"
    )


@pytest.mark.parametrize("rows", ["1", "2"])
def test_texts_are_printed_as_they_grow(
    rows: str, export: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", export, "--prompt=ab", "--prompt=the", "--temperature=0")
    options = (*options, "--max_new_tokens=12", f"--batch_size={rows}", "--stop=\n\n")
    pieces = list[str]()

    def keep(text: str, end: str = "\n") -> None:
        pieces.append(text + end)
        print(text, end=end)

    monkeypatch.setattr(writer, "print_page", keep)
    code, at_once, _ = call(*options)
    slow, pieces[:] = list(pieces), []
    monkeypatch.setattr(writer, "SHOWN_EVERY_S", 0.0)
    assert code == 0 and call(*options)[:2] == (0, at_once)
    assert at_once == "".join(pieces) == "".join(slow)
    assert len(pieces) > 10 and pieces[0].startswith("--- 1 ---\nab")


def test_an_error_has_a_line_of_its_own(
    export: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a text has begun, its line ends first."""
    done = iter([False, False, False])
    monkeypatch.setattr(writer, "SHOWN_EVERY_S", 0.0)
    monkeypatch.setattr(writer.Continuations, "stopped", lambda *_: _fails(done))
    code, out, error = call("--model", export, "--prompt=Once upon", "--temperature=0")
    assert (code, error) == (7, "ERROR: no memory\n") and out.startswith("Once upon")
    assert out.endswith("\n") and not out.endswith("\n\n")


def _fails(done: Iterator[bool]) -> bool:
    """Return the next value, as long as there is one."""
    for value in done:
        return value
    raise OutOfMemoryError("no memory")


def test_a_text_that_changes_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    page = writer.Page()
    page.grow(lambda: "do n")
    page.end("don't")
    page.end("and")
    assert capsys.readouterr().out == "do n\ndon't\nand\n"


def test_a_checkpoint_gives_the_texts_of_its_export(
    run: Path, export: Path, call: Callable[..., Any]
) -> None:
    """From the export, the checkpoint, and the folder of checkpoints; the tokenizer is the one it
    was trained with."""
    options = ("--prompt", "the", "--temperature=0", "--max_new_tokens=12", "--json_lines")
    first = call("--model", export, *options)
    assert first[0] == 0
    for folder in (run / "checkpoints", run / "checkpoints" / "1"):
        assert call("--model", folder, *options)[:2] == first[:2]
        assert (
            call("--model", folder, *options, "--tokenizer_file", export / "tokenizer.json")[:2]
            == first[:2]
        )


def test_a_checkpoint_whose_tokenizer_is_gone_asks_for_one(
    run: Path, call: Callable[..., Any]
) -> None:
    kept = run.parent / "tokenizer.json"
    kept.rename(run.parent / "moved.json")
    try:
        code, _, error = call("--model", run / "checkpoints", "--prompt", "x")
    finally:
        (run.parent / "moved.json").rename(kept)
    assert (
        code == 3
        and f"--tokenizer_file={kept}, which no longer exists" in error
        and error.count("\n") == 1
    )


def test_chat_writes_prompts_by_the_template(
    export: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of the prompt as the template writes it, up to what ends the assistant's
    turn there.

    Without a prompt each line of standard input follows the messages and answers before.
    """
    folder = tmp_path / "model"
    shutil.copytree(export, folder)
    options = ("--temperature=0", "--max_new_tokens=30", "--json_lines")
    code, _, error = call("--model", folder, "--chat", "--prompt=hi", *options)
    assert code == 2 and "this tokenizer has no chat template" in error and error.count("\n") == 1
    (plain,) = objects(call("--model", folder, "--prompt=U:hi;A:", *options)[1])
    end = plain["text"][7:9]
    template = "{% for m in messages %}{{ m.role[0] | upper + ':' + m.content + (';' if loop.first else END) }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template.replace("END", repr(end)))
    (answer,) = objects(call("--model", folder, "--chat", "--prompt=hi", *options)[1])
    assert answer["text"] == plain["text"].partition(end)[0] and answer["finish"] == "stop"
    assert (answer["prompt"], answer["prompt_tokens"]) == ("hi", len("U:hi;A:"))
    assert (
        call("--model", folder, "--chat", "--prompt=hi", *options[:2])[1] == answer["text"] + "\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nho\n"))
    first, second = objects(call("--model", folder, "--chat", *options)[1])
    assert first == answer and (second["index"], second["prompt"]) == (1, "ho")
    written = f"U:hi;A:{answer['text']}{end}U:ho{end}A:"
    (plain,) = objects(call("--model", folder, f"--prompt={written}", *options)[1])
    assert second["text"] == plain["text"].partition(end)[0] and second["prompt_tokens"] == len(
        written.encode()
    )


def test_a_text_does_not_depend_on_other_prompts(export: Path, call: Callable[..., Any]) -> None:
    """Draws, too: in any order, at any place in the batch. A prompt that comes twice draws
    twice."""
    options = (
        "--max_new_tokens=15",
        "--temperature=0.9",
        "--top_k=40",
        "--top_p=0.95",
        "--json_lines",
    )
    options += ("--batch_size=3", "--seed=7")
    together = objects(call("--model", export, *repeated(PROMPTS), *options)[1])
    again = objects(call("--model", export, *repeated(PROMPTS[::-1]), *options)[1])
    assert [line["index"] for line in together] == [0, 1, 2, 3]
    assert together[1]["tokens"] != together[3]["tokens"]
    for line, prompt in zip(together[:3], PROMPTS, strict=False):
        (alone,) = objects(call("--model", export, "--prompt", prompt, *options)[1])
        assert alone["tokens"] == line["tokens"]
    assert [line["tokens"] for line in again] == [together[i]["tokens"] for i in (1, 2, 3, 0)]
    other = objects(call("--model", export, "--prompt", "a", *options[:-1], "--seed=8")[1])
    assert other[0]["tokens"] != together[1]["tokens"]


def test_prompts_come_from_files_and_standard_input(
    export: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo é\n")
    options = ("--max_new_tokens=3", "--temperature=0")
    code, output, _ = call("--model", export, "--prompt", "zero", "--prompts_file", file, *options)
    assert code == 0
    heads = [line for line in output.splitlines() if line.startswith("--- ")]
    assert heads == ["--- 1 ---", "--- 2 ---", "--- 3 ---"]
    assert "\nzero" in output and "\none" in output and "\ntwo é" in output
    stream = io.TextIOWrapper(io.BytesIO(file.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stream)
    found = call("--model", export, "--prompts_file", "-", *options, "--json_lines")[1]
    assert [line["prompt"] for line in objects(found)] == ["one", "two é"]


def test_one_text_is_printed_as_it_is(export: Path, call: Callable[..., Any]) -> None:
    code, output, error = call(
        "--model", export, "--prompt", "def f(", "--max_new_tokens=5", "--seed=3", "--top_k=20"
    )
    assert code == 0 and output.startswith("def f(") and not error
    assert call("--model", export, "--prompt", "", "--max_new_tokens=2")[0] == 0


def test_a_stop_string_cuts_a_text(export: Path, call: Callable[..., Any]) -> None:
    options = (
        "--model",
        export,
        "--prompt",
        "the",
        "--temperature=0",
        "--max_new_tokens=20",
        "--json_lines",
    )
    (whole,) = objects(call(*options)[1])
    stop = whole["text"][4:6]
    (cut,) = objects(call(*options, "--stop", "nowhere", "--stop", stop)[1])
    assert cut["finish"] == "stop" and cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]


def test_a_text_ends_where_the_model_ends(export: Path, call: Callable[..., Any]) -> None:
    prompts = tuple(letter * 60 for letter in "abcdefgh")
    options = ("--max_new_tokens=20", "--json_lines", "--temperature=0")
    code, output, error = call("--model", export, *repeated(prompts), *options)
    lines = [line for line in objects(output) if line["finish"] != "end"]
    assert code == 0 and lines
    assert all(line["finish"] == "context" and len(line["tokens"]) == 4 for line in lines)
    note = "NOTE: text {} ends at 64 tokens (--sequence_length; by default, as in training)"
    assert error.splitlines() == [note.format(line["index"] + 1) for line in lines]


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


DAMAGES: list[tuple[Callable[[Path], Any], int, str]] = [
    (shutil.rmtree, 4, "there is no such folder; give one that holds a model"),
    (remove("tokenizer.json"), 3, "--tokenizer_file"),
    (write("tokenizer.json", "{}"), 3, "not a tokenizer.json"),
    (remove("config.json"), 4, "config.json"),
    (write("config.json", '{"model_type": "bert"}'), 4, "bert"),
    (remove("model.safetensors"), 4, "safetensors"),
    (write("model.safetensors", "x" * 100), 4, "model.safetensors"),
    (lambda folder: edit(folder, num_hidden_layers=3), 4, "model.layers.2"),
    (lambda folder: edit(folder, num_hidden_layers=1), 4, "model.layers.1"),
    (lambda folder: edit(folder, vocab_size=90), 4, "90"),
]


def test_damage_ends_in_one_clear_line(
    export: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    for index, (damage, code, fact) in enumerate(DAMAGES):
        folder = shutil.copytree(export, tmp_path / str(index))
        damage(folder)
        found, output, error = call("--model", folder, "--prompt", "x")
        assert found == code and not output, fact
        assert fact in error and error.startswith("ERROR: ") and error.count("\n") == 1, fact


def test_prompts_that_are_no_use_are_data_errors(export: Path, call: Callable[..., Any]) -> None:
    for options, fact in (
        (["--prompt", "x" * 64], "at most 64"),
        (["--prompts_file", "nowhere.txt"], "--prompts_file=nowhere.txt: cannot be read"),
        (["--prompts_file", __file__.replace("test_generate.py", "__init__.py")], "--prompts_file"),
    ):
        code, _, error = call("--model", export, *options)
        assert code == 3 and fact in error and error.count("\n") == 1, options


def test_a_home_is_found_and_memory_that_is_short_is_told_of(
    export: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--model=~/folder, which a shell leaves alone; and the way out of it is one that this script
    has."""
    monkeypatch.setenv("HOME", str(export.parent))
    assert call("--model=~/1", "--prompt=the", "--max_new_tokens=1")[0] == 0

    def short(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(writer, "load_model", short)
    code, _, error = call("--model=~/1", "--prompt=the", "--max_new_tokens=1")
    assert code == 7 and "--batch_size" in error and "--zero_stage" not in error
