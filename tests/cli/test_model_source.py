"""Whether the folder or the flags decide the model when training begins with pretrained weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import flatten, unflatten
from megatron_lite.config.source import PRESETS
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.huggingface.architectures import check_exports
from megatron_lite.huggingface.model_folder import MODEL_OPTIONS
from megatron_lite.validation import resolve
from tests.support.families import write_folder
from tests.support.harness import TINY
from tests.support.launch import TINY as STARTED
from tests.support.launch import run
from tests.support.light_imports import heavy_imports

ROOT = Path(__file__).resolve().parents[2]
RUN = ("--device=cpu", "--sequence_length=16", "--dataset_source=random", "--batch_size=2")
# What config.json of the fixture says, as flags.
SAME = """
--num_layers=2 --hidden_size=30 --num_attention_heads=6 --head_groups=3 --kv_channels=10 --ffn_hidden_size=44
--vocab_size=61 --gated=1 --activation_type=silu --add_linear_biases=0 --normalization_type=rms_norm
--layer_norm_eps=1e-4 --use_rotary_embeddings=1 --rotary_base=500 --tie_word_embeddings=1 --window_size=7
--max_position_embeddings=64
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral: six query heads of ten channels, three of keys, a window, a tied head."""
    changes = dict(rope_parameters=dict(rope_type="default", rope_theta=500.0), sliding_window=7)
    return write_folder(
        "mistral, yarn, tied", tmp_path_factory.mktemp("mistral") / "model", **changes
    )


def model_of(*flags: str) -> dict[str, Any]:
    """The resolved options of the model."""
    values = flatten(resolve(parse([*RUN, *flags]).config, 1))
    return {name: values[name] for name in MODEL_OPTIONS}


def pretrained(folder: Path, *flags: str) -> dict[str, Any]:
    return model_of(f"--pretrained_checkpoint_path={folder}", *flags)


def test_the_folder_fills_in_the_model(folder: Path) -> None:
    """No model flag needs to be typed: the model equals that of the same flags, except for noise
    and initial values."""
    found, wanted = pretrained(folder), model_of(*SAME)
    different = {name for name in MODEL_OPTIONS if found[name] != wanted[name]}
    assert all(
        name.startswith("init_method_std") or name.endswith("_dropout") for name in different
    )
    assert found["window_size"] == 7 and found["rotary_base"] == 500.0 and found["head_groups"] == 3


def test_the_tokenizer_follows_the_model(folder: Path, tmp_path: Path) -> None:
    """Weights of a folder bring its tokenizer, for text and exports; a typed one wins, an
    architecture brings none."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    flags = (
        f"--pretrained_checkpoint_path={tmp_path}/model",
        "--data_path=/text",
        *RUN[:2],
        "--batch_size=2",
    )
    found = parse(flags)
    assert found.config.data.tokenizer_file == f"{tmp_path}/model/tokenizer.json"
    assert any("the tokenizer is that of the pretrained model" in note.text for note in found.notes)
    assert parse([*flags, "--tokenizer_file=mine.json"]).config.data.tokenizer_file == "mine.json"
    assert parse([*flags, "--load_parts=architecture"]).config.data.tokenizer_file is None


def test_a_run_keeps_the_learned_positions_of_its_checkpoint(tmp_path: Path) -> None:
    """Older versions had 2,048 by default; a new run has as many as a sample has tokens."""
    flags = [*RUN, f"--experiment_dir={tmp_path}"]
    assert model_of(*flags)["max_position_embeddings"] == 16
    assert run(
        [*STARTED, "--train_iters=1", "--max_position_embeddings=99", *flags[-1:]]
    ).codes == [0]
    assert model_of(*flags)["max_position_embeddings"] == 99
    assert model_of(*flags, "--use_rotary_embeddings=1")["max_position_embeddings"] == 16


def test_flags_that_say_the_same_are_fine(folder: Path) -> None:
    """So are other names of the same number, and what stands for a derived value."""
    assert pretrained(folder, *SAME) == pretrained(folder)
    assert pretrained(folder, "--rotary_embedding_scale=-6.214608098422191")["rotary_base"] == 500.0
    assert pretrained(folder, *SAME, "--use_pretrained_config=0")["window_size"] == 7


# Flags that are not what the folder says, and the line that says so.
CONTRADICTIONS = {
    "--hidden_size=32": "--hidden_size: 30 in the checkpoint, 32 now",
    "--num_layers=3": "--num_layers: 2 in the checkpoint, 3 now",
    "--head_groups=6": "--head_groups: 3 in the checkpoint, 6 now",
    "--head_groups=none": "--head_groups: 3 in the checkpoint, 6 now",
    "--head_groups=4": "--head_groups: 3 in the checkpoint, 4 now",
    "--window_size=8": "--window_size: 7 in the checkpoint, 8 now",
    "--window_size=none": "--window_size: 7 in the checkpoint, none now",
    "--rotary_base=10000": "--rotary_base: 500 in the checkpoint, 10000 now",
    "--rotary_embedding_scale=-9.2": "--rotary_embedding_scale: -6.21460809842219",
    "--activation_type=gelu": "--activation_type: silu in the checkpoint, gelu now",
    "--layer_norm_eps=1e-5": "--layer_norm_eps: 0.0001 in the checkpoint, 1e-05 now",
    "--tie_word_embeddings=0": "--tie_word_embeddings: 1 in the checkpoint, 0 now",
    "--vocab_size=64": "--vocab_size: 61 in the checkpoint, 64 now",
    "--normalization_type=layer_norm": "--normalization_type: rms_norm in the checkpoint, layer_norm now",
    "--use_position_embeddings=1": "--use_position_embeddings: 0 in the checkpoint, 1 now",
}


@pytest.mark.parametrize("flag", CONTRADICTIONS)
def test_contradictions(flag: str, folder: Path) -> None:
    """A flag that contradicts the folder is an error with both values; --ignore_pretrained_config=1
    lets it win."""
    with pytest.raises(CheckpointError, match="the flags contradict the model") as caught:
        pretrained(folder, flag)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and lines[1].strip().startswith(CONTRADICTIONS[flag])
    assert "--ignore_pretrained_config=1" in lines[0] and str(folder) in lines[0]
    if flag not in ("--head_groups=4",):  # no model at all
        name = flag[2:].partition("=")[0]
        ours = pretrained(folder, flag, "--ignore_pretrained_config=1")
        derived = {"--head_groups=none": 6}
        assert ours[name] == derived.get(flag, parse([flag]).given[name])
        other = "num_layers" if name != "num_layers" else "hidden_size"
        assert ours[other] == pretrained(folder)[other]


def test_all_contradictions_are_named_at_once(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        pretrained(folder, "--num_layers=3", "--vocab_size=64", "--gated=0")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "--num_layers",
        "--vocab_size",
        "--gated",
    ]


FREE = (
    "--attention_dropout=0.5 --hidden_dropout=0.25 --embedding_dropout=0.125 --init_method_std=0.5 "
    "--init_method_std_qkv=0.25 --layer_norm_init_range=0.5 --random_bias_init=1 --full_precision_residual=1 "
    "--make_vocab_size_divisible_by=64 --max_position_embeddings=128 --zero_centered_normalization=1"
)


@pytest.mark.parametrize("flag", FREE.split())
def test_options_that_do_not_change_the_weights_are_free(flag: str, folder: Path) -> None:
    """Dropouts, initial values, precision, padding; the length, where no position is learned; how
    norms are kept."""
    ((name, value),) = parse([flag]).given.items()
    assert pretrained(folder, flag)[name] == value
    assert pretrained(folder, *SAME, flag, "--use_pretrained_config=0")[name] == value


def test_initial_weights_that_are_never_drawn(folder: Path) -> None:
    """Typed options of initial weights cause a warning with pretrained weights, but not with an
    architecture alone."""
    flags = [*RUN, f"--pretrained_checkpoint_path={folder}"]
    assert parse(flags).warnings == ()
    for name, value in (
        ("init_method_std", "0.5"),
        ("init_method_std_mlp_2", "0.5"),
        ("layer_norm_init_range", "0.1"),
    ):
        (caution,) = parse([*flags, f"--{name}={value}"]).warnings
        assert caution.startswith(f"--{name} has no effect with --pretrained_checkpoint_path")
        assert parse([*flags, f"--{name}={value}", "--load_parts=architecture"]).warnings == ()


def test_options_that_follow_from_a_typed_flag(tmp_path: Path) -> None:
    """A typed flag also replaces the folder's values of the options that follow from it: dropout is
    off everywhere."""
    folder = write_folder(
        "gpt2", tmp_path / "model", resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3
    )
    found = pretrained(folder)
    assert (found["hidden_dropout"], found["embedding_dropout"], found["attention_dropout"]) == (
        0.1,
        0.2,
        0.3,
    )
    assert pretrained(folder, "--hidden_dropout=0")["embedding_dropout"] == 0.0
    # which says nothing new
    assert pretrained(folder, "--hidden_dropout=0.1")["embedding_dropout"] == 0.2
    assert pretrained(folder, "--init_method_std=0.5")["init_method_std_mlp_1"] == 0.5


def test_another_rope_type(tmp_path: Path) -> None:
    """Another --rope_type brings its own parameters; those of the folder's type are dropped."""
    folder = write_folder("mistral, yarn, tied", tmp_path / "model")
    assert pretrained(folder)["rope_attention_factor"] == 1.3
    assert pretrained(folder, "--rope_type=yarn") == pretrained(folder)
    found = pretrained(
        folder, "--rope_type=linear", "--rope_factor=2", "--ignore_pretrained_config=1"
    )
    assert (
        found["rope_factor"] == 2.0
        and found["rope_attention_factor"] is None
        and found["rotary_base"] == 500.0
    )


@pytest.mark.parametrize("source", ["folder", *(name for name in PRESETS if "gpt2" not in name)])
def test_the_length_that_a_typed_rope_stretches_is_the_models_own(
    source: str, folder: Path
) -> None:
    """Not a longer one that is typed beside it; a typed original length wins, and other types have
    none."""
    start = f"--pretrained_checkpoint_path={folder}" if source == "folder" else f"--model={source}"
    own = model_of(start)["max_position_embeddings"]
    for kind in ("llama3", "yarn"):
        if model_of(start)["rope_type"] == kind:
            continue
        typed = [start, f"--rope_type={kind}", "--rope_factor=8", "--ignore_pretrained_config=1"]
        found = model_of(*typed, f"--max_position_embeddings={8 * own}")
        assert (
            found["rope_original_max_position_embeddings"],
            found["max_position_embeddings"],
        ) == (own, 8 * own)
        written = model_of(*typed, "--rope_original_max_position_embeddings=32")
        assert written["rope_original_max_position_embeddings"] == 32
    linear = model_of(
        start, "--rope_type=linear", "--rope_factor=2", "--ignore_pretrained_config=1"
    )
    assert linear["rope_original_max_position_embeddings"] is None


def test_flags_alone(folder: Path) -> None:
    """--use_pretrained_config=0: defaults count as well, and differ; with
    --ignore_pretrained_config=1 they may."""
    with pytest.raises(CheckpointError, match="the flags contradict the model") as caught:
        pretrained(folder, "--use_pretrained_config=0", "--num_layers=2")
    assert "--hidden_size: 30 in the checkpoint, 1024 now" in str(caught.value)
    assert "--num_layers" not in str(caught.value)
    flags = ("--use_pretrained_config=0", "--ignore_pretrained_config=1", "--num_layers=2")
    assert pretrained(folder, *flags) == model_of("--num_layers=2")


def test_preset_counts_as_typed(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="--num_layers: 2 in the checkpoint, 12 now"):
        pretrained(folder, "--model=gpt2")


def test_a_folder_of_which_nothing_would_be_used(folder: Path) -> None:
    """The message names all flags that together leave nothing."""
    flags = (
        "--use_pretrained_config=0",
        "--ignore_pretrained_config=1",
        "--load_parts=architecture",
    )
    said = "nothing of --pretrained_checkpoint_path would be used"
    with pytest.raises(UsageError, match=said) as caught:
        pretrained(folder, *flags)
    assert all(flag in str(caught.value) for flag in flags)


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("org/name", None, "write hf://org/name"),
        ("{folder}/config.json", None, "this is a file"),
        ("{folder}", "distributed", "it holds huggingface weights, not distributed ones"),
        ("{empty}", None, "the folder is empty"),
    ],
)
def test_no_such_folder(
    path: str, kind: str | None, words: str, folder: Path, tmp_path: Path
) -> None:
    """One line with the flag's name, before anything else is looked at."""
    path = path.format(folder=folder, empty=tmp_path)
    flags = [
        f"--pretrained_checkpoint_path={path}",
        *([f"--pretrained_checkpoint_type={kind}"] if kind else []),
    ]
    with pytest.raises(CheckpointError, match="^--pretrained_checkpoint_path: ") as caught:
        parse(flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_mistakes_of_the_command_line_come_first(folder: Path) -> None:
    """A wrong flag is reported without the contradictions that only the missing folder's values
    would cause."""
    with pytest.raises(UsageError) as caught:
        parse(
            [f"--pretrained_checkpoint_path={folder}", "--hiden_size=8", "--num_attention_heads=7"]
        )
    assert len(str(caught.value).splitlines()) == 1


def test_a_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is expanded, and a relative path is one of the current directory."""
    monkeypatch.setenv("HOME", str(folder.parent))
    assert pretrained(Path("~") / folder.name) == pretrained(folder)
    monkeypatch.chdir(folder.parent)
    assert pretrained(Path(folder.name)) == pretrained(folder)


def test_only_the_architecture(folder: Path, tmp_path: Path) -> None:
    """Without weights config.json is enough, and other files in the folder are ignored."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="safe_serialization=True"):
        pretrained(tmp_path)
    assert pretrained(tmp_path, "--load_parts=architecture") == pretrained(folder)


def test_the_command_line_ends_with_code_4(folder: Path, tmp_path: Path) -> None:
    """One line on stderr, exit code 4, the same in exit.json."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    (tmp_path / "model" / "model.safetensors").touch()
    path, experiment = tmp_path / "model", tmp_path / "run"
    outcome = run(
        [*RUN, f"--pretrained_checkpoint_path={path}", f"--experiment_dir={experiment}"], 2
    )
    assert outcome.codes == [4, 4], outcome.output
    assert len(outcome.error_lines()) == 1 and "rwkv" in outcome.output and not any(outcome.stdouts)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["exit_code"] == 4


def test_no_torch_for_a_hugging_face_folder(folder: Path) -> None:
    code = f"parse(['--pretrained_checkpoint_path={folder}'])"
    assert "torch" not in heavy_imports(f"from megatron_lite.cli.parse import parse; {code}")


def test_defaults_are_untouched() -> None:
    """Without the flag nothing is filled in: the options are those that were typed."""
    arguments = parse([f"--{name}={value}" for name, value in TINY.items()])
    assert arguments.config == unflatten(arguments.given) and not arguments.notes


def test_the_architecture_of_the_folder_is_kept(tmp_path: Path) -> None:
    """A Mistral without a window goes out as one, unless flags make it another model; a type that
    is typed must do."""
    folder = write_folder("mistral, yarn, tied", tmp_path / "model")
    start = f"--pretrained_checkpoint_path={folder}"
    assert parse([start, "--dataset_source=random"]).config.training.export_model_type == "mistral"
    other = [start, "--dataset_source=random", "--ignore_pretrained_config=1"]
    assert parse([*other, "--add_mlp_biases=1"]).config.training.export_model_type is None
    assert parse([*other, "--export_model_type=llama"]).config.training.export_model_type == "llama"
    # without, checkpoints keep it
    for exports in (["--export_interval=1", "--experiment_dir=/x"], []):
        wrong = resolve(parse([*other, "--export_model_type=gpt2", *exports]).config, 1)
        with pytest.raises(
            UsageError, match=r"--export_model_type=gpt2 cannot express.*--gated=0 \(not 1\)"
        ):
            check_exports(wrong)
