"""A run's folder is accepted where a model is, and `byte` where a tokenizer.json is."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_lite.cli.model_source import with_source
from megatron_lite.commands import convert_checkpoint, evaluate, generate
from megatron_lite.corpus.prepared import known_tokenizer
from megatron_lite.data.fingerprint import identity
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface.load_pretrained import open_pretrained, open_source
from megatron_lite.model.gpt import build_gpt, shapes_of
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.token_files import save_byte_tokenizer

OPTIONS = dict(vocab_size=257, sequence_length=32, use_rotary_embeddings=True, lr_warmup=0)
PROMPT = ("--device=cpu", "--prompt=the", "--temperature=0", "--max_new_tokens=4")


def save_run(distributed: Distributed, folder: str) -> None:
    """Two checkpoints and two exports of the same iterations."""
    intervals = dict(train_iters=2, checkpoint_interval=1, max_checkpoints=2, export_interval=1)
    train_whole(
        distributed,
        tiny_config(**OPTIONS, **intervals, experiment_dir=folder, tokenizer_file="byte"),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_distributed(1, save_run, str(folder))
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def spoil(folder: Path) -> None:
    """Make the values of a checkpoint or the end of an export unreadable."""
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-64] + (b"\xff" * 64 if file.name.startswith("rank_") else b""))


def test_a_run_stands_for_its_newest_good_model(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoint before export, newer before older; what is taken is said in one line, what is
    skipped in another."""
    order = [run / name for name in ("checkpoints/2", "export/2", "checkpoints/1", "export/1")]
    skipped: list[Path] = []
    for folder in order:
        assert generate.main([f"--model={folder}", *PROMPT]) == 0
        alone = capsys.readouterr()
        assert alone.err == ""
        assert generate.main([f"--model={run}", *PROMPT]) == 0
        out, error = capsys.readouterr()
        (taken,) = error.splitlines()
        assert out == alone.out and taken.startswith(f"model: {folder}, a ")
        for record, path in zip(caplog.records, skipped, strict=True):
            assert f"{path}: " in record.getMessage() and record.getMessage().endswith(
                "; skipped, looking for an older one"
            )
        caplog.clear()
        spoil(folder)
        skipped.append(folder)
    assert generate.main([f"--model={run}", *PROMPT]) == 4
    assert "no usable checkpoint: checkpoints/2: " in capsys.readouterr().err.splitlines()[-1]


def test_every_program_takes_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be.")
    text = ("--device=cpu", f"--text={tmp_path / 'text.txt'}", "--json")
    losses = []
    for model in (run, run / "checkpoints" / "2"):
        assert evaluate.main([f"--model={model}", *text]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]
    for kind in ("huggingface", "distributed"):
        assert (
            convert_checkpoint.main(
                [f"--from={run}", f"--to={tmp_path / kind}", f"--format={kind}"]
            )
            == 0
        )
        assert capsys.readouterr().out.startswith(f"from {run}/checkpoints/2: ")
    values, notes = with_source({"pretrained_checkpoint_path": str(run)})
    assert values["vocab_size"] == 257 and any(
        f"is taken from {run}/checkpoints/2" in note.text for note in notes
    )


def pretrained(distributed: Distributed, folder: str, state: bool) -> str:
    """Return the folder of which a run takes the initial weights, after what it says about
    others."""
    parts = ("model", *["optimizer"] * state)
    config = tiny_config(**OPTIONS, pretrained_checkpoint_path=folder, load_parts=parts)
    said: list[str] = []
    source = open_pretrained(
        config, shapes_of(build_gpt(config.model, 32)), distributed, said.append
    )
    return " ".join([*said, str(source.folder)])


def test_a_run_is_a_start_for_another(run: Path) -> None:
    """Its newest good model; with the optimizer's state the newest good checkpoint."""
    spoil(run / "checkpoints" / "2")
    (said,) = run_distributed(1, pretrained, str(run), False)
    assert said.startswith(
        f"--pretrained_checkpoint_path: {run}/checkpoints/2: "
    ) and said.endswith(f" {run}/export/2")
    (said,) = run_distributed(1, pretrained, str(run), True)
    assert said.endswith(f" {run}/checkpoints/1")


def test_what_only_checkpoints_hold_is_taken_from_them(run: Path) -> None:
    spoil(run / "checkpoints" / "2")
    assert open_source(run, whole=True).folder == run / "export" / "2"
    assert open_source(run, whole=True, state=True).folder == run / "checkpoints" / "1"
    shutil.rmtree(run / "checkpoints")
    assert (
        open_source(run, whole=True, state=True).folder
        == open_source(run / "export").folder
        == run / "export" / "2"
    )


def test_a_run_without_a_model_says_so(run: Path) -> None:
    for name in ("checkpoints", "export"):
        shutil.rmtree(run / name)
    with pytest.raises(
        CheckpointError, match="experiment directory without a checkpoint or an export yet"
    ):
        open_source(run)


def test_byte_is_the_file_of_the_byte_tokenizer(saved: Path, tmp_path: Path) -> None:
    """In exports, in what a resumed run compares, and in the comparison with the data's
    tokenizer."""
    path = tmp_path / "tokenizer.json"
    save_byte_tokenizer(str(path))
    assert (saved / "export" / "2" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert identity([], "byte") == identity([], str(path))
    own, file = (known_tokenizer(name, "") for name in ("byte", str(path)))
    assert own[:3] == file[:3]
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert own.encodes_like(known_tokenizer(str(path), "")), "the same, although the files differ"


@pytest.mark.parametrize("name", ["byte", "tokenizer.json"])
def test_byte_is_accepted_for_any_model(
    name: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder without a tokenizer gets it by name or as a file: the same text, the same copy in an
    export."""
    model = shutil.copytree(
        saved / "export" / "2", tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')  # of another tokenizer
    save_byte_tokenizer("tokenizer.json")
    assert generate.main([f"--model={model}", *PROMPT]) == 3
    assert "--tokenizer_file" in capsys.readouterr().err
    monkeypatch.chdir("/")
    file = name if name == "byte" else str(tmp_path / name)
    assert generate.main([f"--model={model}", *PROMPT, f"--tokenizer_file={file}"]) == 0
    words = [
        f"--from={model}",
        f"--to={tmp_path / 'to'}",
        "--format=huggingface",
        f"--tokenizer_file={file}",
    ]
    assert convert_checkpoint.main(words) == 0
    assert (tmp_path / "to" / "tokenizer.json").read_bytes() == (
        tmp_path / "tokenizer.json"
    ).read_bytes()
