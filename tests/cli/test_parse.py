"""The command line: every spelling, every refusal, and a clear error for any bad input."""

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import megatron_lite
import pretrain_gpt
from megatron_lite.cli.parse import HelpRequested, parse
from megatron_lite.cli.unknown_flags import by_name, instead, refused
from megatron_lite.config import flatten
from megatron_lite.config.other_programs import table
from megatron_lite.config.values import FLAGS, QUOTES, SPELLINGS, Flag
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.run.launch import launch_rank, launch_world_size
from megatron_lite.validation import resolve

INSTEAD, REFUSED = instead(), refused()
ROOT = Path(__file__).resolve().parents[2]

# The variables of the tutorial (seed page) as bash leaves them.
TRAINING_ARGS = """\
--batch_size=128 --sequence_length=8192 --train_iters=500000 --weight_decay=0.1 --adam_beta1=0.9 --adam_beta2=0.95
--clip_grad=1.0 --lr=0.0001 --lr_warmup_iters=1000 --lr_decay_style=cosine --lr_decay_iters=500000 --min_lr=0.000003
"""
PERFORMANCE_ARGS = "--training_dtype=bf16 --num_workers=8"
PERFORMANCE_ARGS_SMALL_CLUSTER = PERFORMANCE_ARGS + " --micro_batch_size=1 --zero_stage=2"
MONITORING_ARGS = """\
--experiment_dir=$EXP_BASE_DIR --validation_iters=25 --validation_interval=1000 --max_checkpoints=5
--export_interval=25000 --log_interval=10 --log_offset=0 --checkpoint_interval=500
"""
WANDB_ARGS = """\
--wandb_entity_name=$WANDB_ENTITY_NAME --wandb_project_name=$PROJECT_NAME --wandb_group_name=$PROJECT_VERSION
"""
MODEL_ARGS = """\
--num_layers=32 --hidden_size=4096 --vocab_size=32000 --num_attention_heads=32 --head_groups=8 --add_linear_biases=0
--ffn_hidden_size=14336 --kv_channels=128 --use_rotary_embeddings=1 --rotary_embedding_scale=-9.210340371976184
--gated=1 --activation_type=silu --normalization_type=rms_norm --tie_word_embeddings=0 --window_size=4096
"""
DATA_ARGS = "--split=9998,2,0 --dataset_source=list --data_path $DATA_PATH"

HOSTILE = (
    *(
        "",
        " ",
        "\n",
        "\t",
        "a b",
        "1\n",
        "\x00",
        "1\x00",
        "\udcff",
        "\U0001f600",
        "\uff11\uff12",
        "\u0661",
        "\u00b2",
    ),
    *("\u201c1\u201d", "1" * 30, "9" * 20_000, "x" * 100_000),
    *"nan NaN inf -inf Infinity 1e999 -1e999 1e-999 -1 0 1_000 0x10 1e5 5e5 1.5.2 --1 1,2 none None True yes".split(),
    *"'1' \"1\" %s%n $HOME `id` @ ~ - -- ../.. [] {} -0 +1 1. .5 1e e1 00000001".split(),
)


def value(argv: Sequence[str], name: str) -> Any:
    return flatten(parse(argv).config)[name]


def problem(argv: Sequence[str]) -> str:
    """The error of a command line that would be complete without data files."""
    with pytest.raises(UsageError) as caught:
        parse([*argv, "--dataset_source=random"])
    return str(caught.value)


def words(text: str, **variables: str) -> list[str]:
    """The words that bash makes of an unquoted variable."""
    for name, content in variables.items():
        text = text.replace(f"${name}", content)
    return text.split()


# --- Spellings


def test_spellings_of_one_flag() -> None:
    """Underscores or dashes, `=` or a space, and other programs' names are the same flag."""
    ours = "--batch_size=6|--batch_size 6|--batch-size=6|--batch-size 6|--batch_size=+6"
    for typed in f"{ours}|--global_batch_size=6|--global-batch-size 6|--train-batch-size=6".split(
        "|"
    ):
        arguments = parse(typed.split())
        assert (arguments.given, arguments.warnings) == ({"batch_size": 6}, ()), typed


def test_every_option_and_alias_is_a_flag() -> None:
    """Each spelling sets its own option and no other, and no spelling means two things."""
    spellings = [spelling for flag in FLAGS.values() for spelling in (flag.name, *flag.aliases)]
    assert len(spellings) == len(set(spellings))
    assert not set(spellings) & (set(REFUSED) | set(INSTEAD))
    assert not set(REFUSED) & set(INSTEAD)
    for spelling, flag in SPELLINGS.items():
        assert list(parse([f"--{spelling}={some_value(flag)}"]).given) == [flag.name]


def some_value(flag: Flag) -> str:
    """A value that a flag takes if nothing else is said."""
    option = flag
    if option.choices:
        return option.choices[-1]
    if option.below is not None:
        return "0.5" if option.below > 0.5 else "-1"
    own = {
        "rotary_embedding_scale": "-1",
        "rotary_base": "10",
        "window_rotary_base": "10",
        "batch_size_schedule": "0:1",
        "lr_schedule": "constant,-1,1",
        "pretrained_checkpoint_path": "none",
        "export_callback_env": "{}",
    }
    return own.get(flag.name, "1" if option.minimum is None else str(max(1, int(option.minimum))))


def test_booleans() -> None:
    """0, 1, true and false, bare for 1; a following word is the value."""
    for name in [flag.name for flag in FLAGS.values() if flag.kind == "bool"]:
        for argv, expected in (
            ([f"--{name}"], True),
            ([f"--{name}=1"], True),
            ([f"--{name}", "true"], True),
            ([f"--{name}=True"], True),
            ([f"--{name}=0"], False),
            ([f"--{name}", "0"], False),
            ([f"--{name}=false"], False),
            ([f"--{name}", "--seed=3"], True),
        ):
            assert value(argv, name) is expected, argv
        for wrong in ("yes", "2", "on", "01", "no"):
            assert problem([f"--{name}={wrong}"]).startswith(f"--{name}={wrong}: takes 0 or 1")
        assert problem([f"--{name}=yes"]).endswith(f"; write --{name}=1")
        assert problem([f"--{name}=no"]).endswith(f"; write --{name}=0")
        assert f"no_{name}" in INSTEAD or problem([f"--no_{name}"]).endswith(f"write --{name}=0")


def test_none_and_empty_values() -> None:
    """`none` is the derived default of every optional value; empty means that for text and is an
    error elsewhere."""
    for flag in FLAGS.values():
        if flag.optional:
            assert value([f"--{flag.name}=none"], flag.name) == (
                "none" if "none" in flag.words else None
            )
        elif not flag.is_text and not flag.is_list and "none" not in flag.choices:
            assert problem([f"--{flag.name}=none"]).startswith(f"--{flag.name}=none: ")
        # else weeks from scratch
        if flag.is_text and not flag.never_empty:
            assert value([f"--{flag.name}="], flag.name) == flag.default
            assert value([f"--{flag.name}", ""], flag.name) == flag.default
        else:
            assert f"--{flag.name}=''" in problem([f"--{flag.name}="])
            assert "is empty" in problem([f"--{flag.name}="])


def test_repeated_flags() -> None:
    """The last one wins; a warning names both values if they differ, also across spellings."""
    arguments = parse(["--batch_size=4", "--lr=1e-4", "--global-batch-size", "8", "--lr=0.0001"])
    assert arguments.config.batch.batch_size == 8
    assert arguments.warnings == ("--batch_size is given twice: 8 is used, 4 is not",)


def test_lists() -> None:
    """Items are separated by commas, spaces or words; an empty or illegal item makes the list
    illegal."""
    for argv in (
        ["--split=9998,2,0"],
        ["--split", "9998", "2", "0"],
        ["--split", "9998,", "2,", "0"],
        ["--split", "9998 2 0"],
        ["--split=9998", "2", "0"],
        ["--split=9998, 2 ,0"],
        ["--split", "9998,2", "0", "--seed=1"],
    ):
        assert value(argv, "split") == (9998.0, 2.0, 0.0), argv
    for text in ("1,,2", ",1", "1,", ",", "1,x", "1,nan", "1 -1", "1,1e999"):
        assert "--split=" in problem([f"--split={text}"])


def test_data_path() -> None:
    """Weights and prefixes are kept as words, whichever way they are separated."""
    expected = ("0.3", "a", "0.7", "b")
    for argv in (
        ["--data_path", "0.3", "a", "0.7", "b"],
        ["--data_path=0.3,a,0.7,b"],
        ["--data_path", "0.3 a 0.7 b"],
    ):
        assert value([*argv, "--gated"], "data_path") == expected


def test_negative_numbers_are_values() -> None:
    """A word that begins with a minus and a digit is a value, not a flag."""
    assert (
        value(
            ["--rotary_embedding_scale", "-9.2", "--use_rotary_embeddings"],
            "rotary_embedding_scale",
        )
        == -9.2
    )
    assert value(["--rotary_embedding_scale", "-.5"], "rotary_embedding_scale") == -0.5
    assert problem(["--lr", "-1"]) == "--lr=-1: must be >= 0, as in --lr=0.0001"
    assert problem(["--lr", "-inf"]).startswith("--lr=-inf: not a finite number")


def test_literal_quotes() -> None:
    """Quotes that a shell left in a value are refused with the fix, as one problem."""
    for mark in QUOTES:
        text = problem([f"--experiment_name={mark}run{mark}"])
        assert "begins with a literal quote" in text and "leave the quotes out" in text
        text = problem([f"--experiment_name={mark}my", f"run{mark}", "--lr=1"])
        assert len(text.splitlines()) == 1 and "@file" in text
        assert "literal quote" in problem(["--data_path", f"{mark}a", "b"])
        assert "literal quote" in problem([f"--lr={mark}1{mark}"])


def test_stray_words() -> None:
    """Words that belong to no flag are refused, with the likely reason."""
    assert problem(["train"]).startswith("stray word train: ")
    assert problem(["train", "now"]).startswith("stray word train and 1 more: ")
    assert problem(["{", '"lr":', "3", "}"]).startswith(
        "stray word { and 3 more: an @file holds flags "
    )
    assert "lr=1e-3), not YAML" in problem(["num_layers:", "2", "lr:", "3"])
    assert problem(["lr=3"]) == "stray word lr=3: flags begin with two dashes; write --lr=3"
    assert problem(["model.n_layer=3"]).endswith(
        "flags begin with two dashes; write --num_layers=3"
    )
    assert "configuration files are not read" in problem(["config/train_gpt2.py"])
    assert problem(["--lr=3", "4", "5"]).startswith("stray word 4 and 1 more after --lr=3: ")
    assert problem(["--lr", "3", "4"]).startswith("stray word 4 after --lr=3: ")
    assert "write $ARGS instead of" in problem(["--lr=1 --seed=2"])
    assert problem(["--lr 3 --seed 4"]).startswith(
        "the shell passed '--lr 3 --seed 4' as one word; remove the quotes"
    )
    assert "write $ARGS instead of" in problem(["--experiment_name=a --seed=2"])
    assert "write $ARGS instead of" in problem([""])
    assert problem(["-lr=3"]).endswith("write --lr=3")
    assert problem(["-lr", "3"]).endswith("write --lr=3")
    assert problem(["\u2013lr=3"]).endswith("write --lr=3")
    assert problem(["--data_path", "a", "\u2014lr=3"]).endswith("write --lr=3")
    assert problem(["--"]).startswith("unknown flag --;")
    assert problem(["---lr=3"]).endswith("write --lr=3")


# --- Unknown flags


def test_unknown_flag_is_short_and_helpful() -> None:
    """One line with the nearest names; contradictions that the misspelled flag may cause are left
    out."""
    assert problem(["--num_leyers=3"]) == "unknown flag --num_leyers; did you mean --num_layers?"
    assert problem(["--num_l=5"]) == "unknown flag --num_l; did you mean --num_layers?"
    assert problem(["--lr_warm=5"]).startswith("unknown flag --lr_warm; did you mean --lr_warmup")
    assert problem(["--LR=3"]).endswith("write --lr=3")
    assert problem(["--no-gated"]) == "unknown flag --no-gated; write --gated=0"
    assert problem(["--zzzzzzzzzzz"]) == "unknown flag --zzzzzzzzzzz; --help_all lists all flags"
    assert len(problem(["--" + "x" * 1_000_000])) < 200


# --- Bad values


def survives(name: str, *argv: str) -> None:
    """A command line is legal or ends in a UsageError of one short line; numbers stay finite.

    So is any path of a pretrained checkpoint, which is looked for: a CheckpointError.
    """
    try:
        arguments = parse(argv)
        config = resolve(arguments.config, 2)
    except (CheckpointError, UsageError) as error:
        assert isinstance(error, UsageError) or name == "pretrained_checkpoint_path", argv
        message = str(error)
        assert message and len(message) < 2000, argv
        message.encode()  # can be printed and written to a JSON file
        return
    except HelpRequested:
        pytest.fail(f"help instead of an error: {argv}")
    numbers = [number for number in flatten(config).values() if isinstance(number, (int, float))]
    assert all(abs(number) < float("inf") for number in numbers), argv


OTHERS = [name for name in (*SPELLINGS, *REFUSED, *[*INSTEAD][::20]) if name not in FLAGS]


def test_every_flag_survives_hostile_values() -> None:
    """Each flag gets a twelfth of the values behind `=`, and each value goes to a twelfth of the
    flags; half as many also come as the next word, and to other spellings, which are refused or
    mean a flag.
    """
    for place, hostile in enumerate(HOSTILE):
        for name in [*FLAGS][place % 12 :: 12]:
            survives(name, f"--{name}={hostile}")
        for name in [*FLAGS][place % 24 :: 24]:
            survives(name, f"--{name}", hostile)
        for name in OTHERS[place % 24 :: 24]:
            survives(name, f"--{name}={hostile}")


@pytest.mark.slow
def test_every_spelling_survives_hostile_values() -> None:
    """The full table."""
    for name in (*FLAGS, *OTHERS):
        for hostile in HOSTILE:
            survives(name, f"--{name}={hostile}")
            if name in FLAGS:
                survives(name, f"--{name}", hostile)


def test_numeric_flags_refuse_garbage() -> None:
    """Numeric flags refuse, by name, numbers that Python would accept but no user means; each gets
    a third of them."""
    garbage = (
        "nan",
        "inf",
        "-inf",
        "Infinity",
        "1e999",
        "1_0",
        "\uff11",
        "\u0661",
        "0x1",
        "9" * 10**5,
        "1\x00",
        "1 ",
    )
    for place, name in enumerate(
        flag.name for flag in FLAGS.values() if flag.kind in ("int", "float") and not flag.is_list
    ):
        for text in garbage[place % 3 :: 3]:
            message = problem([f"--{name}={text}"])
            assert message.startswith(f"--{name}="), message
            assert len(message) < 300


def test_hints_for_numbers() -> None:
    """A number in another notation is refused; an integer with an exponent or a point gets the
    digits to write."""
    for text, meant in (
        ("5e5", 500000),
        ("10.0", 10),
        ("1_000", 1000),
        ("1,000", 1000),
        ("2M", 2000000),
    ):
        wrong = f"--train_iters={text}: not an integer (must be >= 0); write --train_iters={meant}"
        assert problem([f"--train_iters={text}"]) == wrong
    assert problem(["--batch_size=1k"]).endswith("; write --batch_size=1000 or --batch_size=1024")
    for text in ("1.5", "\uff11\uff12", "1e300", "1e999", "k"):
        assert "not an integer; write it in plain ASCII digits" in problem(
            [f"--train_iters={text}"]
        )
    for text, meant in (("1_000.5", "1000.5"), ("10%", "0.1"), ("0,001", "0.001")):
        assert problem([f"--lr={text}"]).endswith(f"; write --lr={meant}")
    for text in ("\uff11", "1e", "1e-"):
        assert "not a number; write it in plain ASCII digits" in problem([f"--lr={text}"])
    assert "too large for a 64-bit integer" in problem([f"--train_iters={2**63}"])
    assert value([f"--train_iters={2**63 - 1}"], "train_iters") == 2**63 - 1
    assert "too small" in problem(["--lr=1e-400"])
    assert str(value(["--lr=-0.0"], "lr")) == "0.0"


def test_bounds_are_named() -> None:
    """A number out of range is refused with the range."""
    assert (
        problem(["--adam_beta1=1"])
        == "--adam_beta1=1: must be >= 0 and < 1, as in --adam_beta1=0.9"
    )
    assert problem(["--hidden_size=0"]) == "--hidden_size=0: must be >= 1, as in --hidden_size=1024"
    assert (
        problem(["--zero_stage=4"])
        == "--zero_stage=4: must be >= 1 and <= 3, or auto, as in --zero_stage=1"
    )
    assert "full optimizer state" in problem(["--zero_stage=0"])


def test_choices() -> None:
    """A name is one of those offered or an alias; else all are listed and the nearest is named."""
    assert value(["--training_dtype=bfloat16"], "training_dtype") == "bf16"
    others = "gelu_tanh=gelu gelu_new=gelu gelu_pytorch_tanh=gelu swish=silu relu2=squared_relu linear=identity"
    for other, name in (pair.split("=") for pair in others.split()):
        assert value(["--activation_type", other], "activation_type") == name
    assert "did you mean --lr_decay_style=cosine?" in problem(["--lr_decay_style=cosin"])
    for text in ("RMSNorm", "rmsnorm", "RMS-Norm"):
        assert problem([f"--normalization_type={text}"]).endswith(
            "; write --normalization_type=rms_norm"
        )
    assert "takes constant, linear, cosine, power, inv_sqrt" in problem(["--lr_decay_style=x"])


def test_missing_value() -> None:
    """A flag that needs a value and has none says so."""
    for name in ("lr", "data_path", "split", "experiment_dir", "device"):
        assert problem([f"--{name}", "--gated"]).startswith(
            f"--{name}: a value must follow, as in --{name}="
        )


def test_home_directory() -> None:
    """The shell leaves `--flag=~/x` alone, so the ~ of paths is replaced here; other texts keep
    it."""
    home = os.path.expanduser("~")
    assert value(["--experiment_dir=~/x"], "experiment_dir") == f"{home}/x"
    assert value(["--data_path", "0.5", "~/a"], "data_path") == ("0.5", f"{home}/a")
    assert value(["--experiment_name=~x"], "experiment_name") == "~x"


def test_all_problems_at_once() -> None:
    """Bad values, refusals and contradictions between the other flags come in one error, one line
    each."""
    typed = [
        "--lr=nan",
        "--sequence_data_parallel=2",
        "--num_attention_heads=7",
        "--train_iters=5e5",
    ]
    lines = problem(typed).splitlines()
    names = ["--lr", "--sequence_data_parallel", "--train_iters", "--hidden_size"]
    assert [line.partition("=")[0] for line in lines] == names


def test_contradictions_of_wrong_values_are_left_out() -> None:
    """An option whose value is unknown is not blamed for contradicting others."""
    assert len(problem(["--hidden_size=x", "--num_attention_heads=7"]).splitlines()) == 1


def test_experiment_dir_of_an_error() -> None:
    """The error has the experiment directory if that flag could be read, so that exit.json can be
    written; a dry run writes nothing."""
    for argv, expected in (
        (["--lr=x", "--experiment_dir=/a"], "/a"),
        (["--lr=x", "--experiment_dir=/a", "--dry_run=0"], "/a"),
        (["--lr=x", "--experiment_dir=/a", "--dry_run=1"], None),
        (["--experiment_dir='a", "--lr=x"], None),
    ):
        with pytest.raises(UsageError) as caught:
            parse(argv)
        assert (caught.value.experiment_dir, caught.value.exit_code) == (expected, 2)


# --- Files of flags


def test_file_of_flags(tmp_path: Path) -> None:
    """Shell words, quotes, comments, joined lines; the rest of the command line follows."""
    (tmp_path / "run.args").write_text(
        "# it's a comment with a quote\n--lr=3 --seed 4 # more\n--experiment_name='my run#1' \\\n  --batch_size=8\n"
        "--wandb_group_name=a#b --wandb_project_name \"x 'y'\"\n--tokenizer_file=a\\ b\r\n# last \\\n--data_path a b"
    )
    arguments = parse(["--seed=1", f"@{tmp_path}/run.args", "c", "--batch_size=16"])
    assert arguments.given == {
        "seed": 4,
        "lr": 3.0,
        "experiment_name": "my run#1",
        "batch_size": 16,
        "wandb_group_name": "a#b",
        "wandb_project_name": "x 'y'",
        "tokenizer_file": "a b",
        "data_path": ("a", "b", "c"),
    }
    assert len(arguments.warnings) == 2


def test_files_include_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An @file in an @file is relative to its folder, not to the current one; the same file may
    come twice."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "run.args").write_text("@sub/model.args --lr=2\n@base.args")
    (tmp_path / "sub" / "model.args").write_text("@../base.args --num_layers=3")
    (tmp_path / "base.args").write_text("--seed=7")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert parse(["@../run.args"]).given == {"seed": 7, "num_layers": 3, "lr": 2.0}


def test_values_from_a_file(tmp_path: Path) -> None:
    """A file may also hold the words of a list."""
    (tmp_path / "paths").write_text("0.3 a\n0.7 b")
    assert value(["--data_path", f"@{tmp_path}/paths"], "data_path") == ("0.3", "a", "0.7", "b")
    assert value(["--experiment_name=@x"], "experiment_name") == "@x"


def test_bad_files(tmp_path: Path) -> None:
    """Missing, cyclic, binary, unclosed and huge files are refused by name."""
    (tmp_path / "a").write_text("@b")
    (tmp_path / "b").write_text("--lr=1 @./a")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "unclosed").write_text("--experiment_name='x")
    (tmp_path / "huge").write_bytes(b" " * (2**20 + 1))
    (tmp_path / "many").write_text("@one " * 1000)
    (tmp_path / "one").write_text("--seed=1")
    (tmp_path / "variable").write_text("--experiment_dir=$HOME/x")
    (tmp_path / "wrong").write_text("--lr=x")
    for name, text in (
        ("missing", "No such file"),
        ("a", "includes itself"),
        ("binary", "not a UTF-8 text"),
        ("", "directory"),
        ("unclosed", "no closing quotation"),
        ("huge", "larger than"),
        ("many", "more than 100 files"),
        ("variable", "no variables"),
        ("wrong", "wrong)"),
        ("nul\0", "null"),
        ("x" * 5000, "too long"),
    ):
        message = problem([f"@{tmp_path}/{name}"])
        assert text in message and len(message.splitlines()) == 1, message
        message.encode()
    assert problem(["@"]).startswith("@: ")


def test_nested_bomb_of_files_ends(tmp_path: Path) -> None:
    """Files that each include the next one twice end in an error, not in a hang."""
    for index in range(40):
        (tmp_path / str(index)).write_text(f"@{index + 1} @{index + 1}")
    (tmp_path / "40").write_text("")
    start = time.perf_counter()
    assert "more than 100 files" in problem([f"@{tmp_path}/0"])
    assert time.perf_counter() - start < 2.0


# --- Flags of other programs


def test_refused_flags() -> None:
    """A flag without an option is accepted only with the values that change nothing, and is never
    `given`."""
    for name, row in REFUSED.items():
        for accepted in row.only:
            for text in ([f"--{name}={accepted}"], [f"--{name.replace('_', '-')}", accepted]):
                assert parse(text).given == {}, text
        for wrong in {"17", "something", "-1", *("01" if row.switch else "")} - {*row.only}:
            message = problem([f"--{name}={wrong}"])
            assert message.startswith(f"--{name}={wrong} is refused: {row.remark}")
        if row.switch and "1" in row.only:
            assert parse([f"--{name}"]).given == parse([f"--{name}=true"]).given == {}, name
        else:
            assert "is refused" in problem([f"--{name}"])


def test_accepted_values_in_other_notations() -> None:
    """1, 1.0 and true are the same, and so are an empty value and none."""
    for text in (
        "sequence_data_parallel=1.0",
        "imported_model_type=",
        "micro_sequence_length=[]",
        "reproducible_init=true",
        "compile_all=False",
        "optimization_dtype=FP32",
        "normalization_implementation=AUTO",
    ):
        assert parse([f"--{text}"]).given == {}


def test_refused_values() -> None:
    """Values of an option that exists elsewhere only are refused with the reason."""
    for typed, reason in table().values.items():
        value = re.search("<[a-z]+>", typed)
        for text in (["[2]"] if value[0] == "<list>" else ["2", "17"]) if value else [""]:
            said, why = (
                words.replace(value[0], text) if value else words for words in (typed, reason)
            )
            assert problem([f"--{said}"]) == f"--{said}: {why}"


def test_other_spellings_are_named() -> None:
    """A flag of another program is refused with what to write."""
    for place, name in enumerate(name for name in INSTEAD if not name.endswith("*")):
        spellings = ([f"--{name}"], [f"--{name}=?!"], [f"--{name.replace('_', '-')}", "?!"])
        # a value would choose a case
        argv = spellings[place % 3 if len(by_name()[name]) == 1 else 0]
        assert f"is not a flag here: {INSTEAD[name]}" in problem(argv), argv


def test_families_of_flags() -> None:
    """A name that is in no table is answered by its beginning, unless it is a typo of a flag."""
    for name in (
        "moe_future_option",
        "fp8-future-option",
        "rl_future",
        "hub_future",
        "ckpt-future",
    ):
        assert " is not a flag here: " in problem([f"--{name}=1"])
    assert problem(["--rl_decay_style=cosine"]).endswith("did you mean --lr_decay_style?")


def test_secrets_are_not_repeated() -> None:
    """A key on the command line is refused without printing it."""
    assert "hunter2" not in problem(["--wandb_api_key=hunter2"])


# --- The tutorial


def test_tutorial_arguments() -> None:
    """The environment strings of the tutorial parse verbatim and resolve on the machines that it
    names."""
    argv = [
        *words(MODEL_ARGS),
        *words(DATA_ARGS, DATA_PATH="/data/corpus"),
        *words(TRAINING_ARGS),
        *words(PERFORMANCE_ARGS),
        *words(MONITORING_ARGS, EXP_BASE_DIR="/runs/mistral"),
        *words(WANDB_ARGS, WANDB_ENTITY_NAME="me", PROJECT_NAME="project", PROJECT_VERSION="v1"),
    ]
    arguments = parse(argv)
    assert arguments.warnings == ()
    config = resolve(arguments.config, 128)
    assert (config.batch.micro_batch_size, config.batch.sequential_micro_batches) == (1, 1)
    assert (
        config.model.head_groups,
        config.model.kv_channels,
        config.model.use_position_embeddings,
    ) == (8, 128, False)
    assert (config.learning_rate.min_lr, config.learning_rate.lr_decay_iters) == (3e-6, 500000)
    assert (config.run.experiment_name, config.tracking.wandb_entity_name) == ("mistral", "me")
    assert (config.checkpoint.max_checkpoints, config.run.log_offset) == (5, 0)
    small = resolve(parse([*argv, *words(PERFORMANCE_ARGS_SMALL_CLUSTER)]).config, 4)
    assert (small.batch.micro_batch_size, small.batch.depth_first_micro_batches) == (1, 32)
    assert small.multi_stage.zero_stage == 2


def test_tutorial_arguments_with_unset_variables() -> None:
    """Unset Weights & Biases variables turn it off; an unset experiment directory is noticed."""
    argv = words(WANDB_ARGS, WANDB_ENTITY_NAME="", PROJECT_NAME="", PROJECT_VERSION="")
    run = parse(argv).config.tracking
    assert (run.wandb_entity_name, run.wandb_project_name, run.wandb_group_name) == (
        None,
        "megatron_lite",
        "default",
    )
    unset = parse(
        [*words(MONITORING_ARGS, EXP_BASE_DIR=""), "--dataset_source=random", "--split=1,1"]
    )
    with pytest.raises(UsageError, match="--checkpoint_interval=500: there is nowhere to save"):
        resolve(unset.config, 1)


# --- Help and the process


def test_help_and_version() -> None:
    """They come wherever they are asked for, whatever else is wrong."""
    for flag in ("--help", "--help_all", "--help-all", "-h", "--version"):
        with pytest.raises(HelpRequested) as caught:
            parse(["--lr=x", flag, "--unknown"])
        text = str(caught.value)
        assert (
            text.startswith("usage: ")
            if "h" in flag
            else text == f"megatron_lite {megatron_lite.__version__}"
        )
        assert ("--debug_layer_outputs" in text) == ("all" in flag)


def test_quick_and_without_torch() -> None:
    """Help and errors import neither torch nor numpy, and take less than half a second, interpreter
    start included.

    Processor time is measured, the best of three: the machine may be busy.
    """
    code = (
        "import sys\nfrom megatron_lite.cli.parse import HelpRequested, parse\n"
        "from megatron_lite.errors import UsageError\n"
        "for argv in (['--help_all'], ['--lrr=1'] * 5, ['--lr=x'], ['--num_attention_heads=7', '--lr=x']):\n"
        "    try: parse(argv)\n    except (HelpRequested, UsageError): pass\n    else: sys.exit('no error')\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'wandb', 'tokenizers', 'argparse'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.stdout.strip() == "[]"
    assert min(seconds) < 0.5


def test_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank and world size come from torchrun, with one process without it; nonsense is a usage
    error."""
    for variables, expected in (
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"RANK": ""}, (0, 1)),
    ):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "29500")
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        assert (launch_rank(), launch_world_size()) == expected
    for rank, world_size in (
        ("0", "x"),
        ("x", "1"),
        ("0", "0"),
        ("0", "-1"),
        ("3", "3"),
        ("0", "9" * 5000),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert launch_rank() in (0, 3)
        with pytest.raises(UsageError, match="environment variable"):
            launch_world_size()
    for missing in ("MASTER_ADDR", "MASTER_PORT"):
        with monkeypatch.context() as context:
            context.setenv("RANK", "0")
            context.setenv("WORLD_SIZE", "2")
            context.setenv(missing, "")
            with pytest.raises(UsageError, match=f"{missing} not set"):
                launch_world_size()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(UsageError, match="environment variable LOCAL_RANK"):
        launch_world_size()


def test_a_wrong_launch_is_said_by_every_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by one that is not the first of its machine, because its rank may be what is wrong."""
    for wrong in (
        {"RANK": "5"},
        {"RANK": "1", "MASTER_PORT": ""},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "x"},
    ):
        with monkeypatch.context() as context:
            context.delenv("LOCAL_RANK", raising=False)
            for name, text in {
                "MASTER_ADDR": "here",
                "MASTER_PORT": "1",
                "WORLD_SIZE": "2",
                **wrong,
            }.items():
                context.setenv(name, text)
            assert pretrain_gpt.main(["--dataset_source=random"]) == 2
        assert capsys.readouterr().err.startswith("ERROR: ")


@pytest.mark.slow
def test_every_flag_survives_hostile_values_up_to_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any value of any flag ends in a plan (0), or in a short message with code 2, for a missing
    folder 4."""
    monkeypatch.chdir(tmp_path)
    tiny = "--num_layers=2 --hidden_size=32 --num_attention_heads=4 --vocab_size=64 --sequence_length=16 --batch_size=4"
    flags = [
        *tiny.split(),
        "--train_iters=10",
        "--dataset_source=random",
        "--device=cpu",
        "--dry_run=1",
    ]
    for name in FLAGS:
        codes = {0, 2, 4} if name == "pretrained_checkpoint_path" else {0, 2}
        for hostile in HOSTILE:
            assert pretrain_gpt.main([*flags, f"--{name}={hostile}"]) in codes, (name, hostile)
            error = capsys.readouterr().err
            assert len(error) < 4000 and len(error.splitlines()) <= 20, (name, hostile)
    assert not [*tmp_path.iterdir()]  # a plan writes nothing
