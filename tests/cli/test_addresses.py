"""An address with a password or a key, typed into every option of every program: refused, and shown
nowhere."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron_lite.cli.parse import parse
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.commands import VERBS
from megatron_lite.commands import command as megatron_lite_command
from megatron_lite.config.values import FLAGS, SPELLINGS
from megatron_lite.errors import UsageError, check_addresses, without_credentials
from tests.support.launch import TINY, run, succeed

SECRET = "s3cr3t"
ADDRESS = f"https://me:{SECRET}@host/a"
RULE = "write addresses without user, password or key"
OPTIONS = [spelling for spelling, flag in SPELLINGS.items() if not flag.secret]
SCRIPTS = ("compare_tensor_logs", "concatenate_dataset", "prove_layouts", "replay_step")
PROGRAMS = (
    *(module for verb, module in VERBS.items() if verb != "pretrain_gpt"),
    *(f"scripts.{name}" for name in SCRIPTS),
)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (ADDRESS, "https://..."),
        (f"https://{SECRET}@host/a", "https://..."),
        (f"s3://AKIA:s3/{SECRET}@bucket/run", "s3://..."),
        (f"https://me:p@{SECRET}@host/a", "https://..."),
        (f"https:/me:{SECRET}@host/a", "https:/..."),
        (f"--data_path=0.3,s3://b/a,0.7,{ADDRESS}", "--data_path=0.3,s3://b/a,0.7,https://..."),
        (f"{ADDRESS} b HTTP://me:{SECRET}@host", "https://... b HTTP://..."),
        (f"gs://bucket/run?token={SECRET}", "gs://bucket/run?token=..."),
        (
            f"https://h/a?X-Amz-Date=1&X-Amz-Signature={SECRET}&b=1",
            "https://h/a?X-Amz-Date=1&X-Amz-Signature=...",
        ),
        (
            f"https://h/a?AWSAccessKeyId={SECRET}&Signature={SECRET}",
            "https://h/a?AWSAccessKeyId=...",
        ),
        (f"https://account.blob/a?sv=1&sig={SECRET}", "https://account.blob/a?sv=1&sig=..."),
        (f"https://h/a#access_token={SECRET}", "https://h/a#access_token=..."),
        (f"https://h/a?api-key={SECRET}", "https://h/a?api-key=..."),
        (f"https://h/a?user=me&pass={SECRET}", "https://h/a?user=me&pass=..."),
        (f"https://h/a?user=me;pw={SECRET}", "https://h/a?user=me;pw=..."),
        (f"https://h/a?jwt={SECRET}", "https://h/a?jwt=..."),
    ],
)
def test_what_is_a_secret_in_an_address(typed: str, shown: str) -> None:
    """User, password and the keys of signed queries, in any list of words."""
    assert without_credentials(typed) == shown
    with pytest.raises(UsageError, match=RULE) as refused:
        check_addresses(["--lr=1", typed])
    assert SECRET not in str(refused.value)


def test_what_is_none() -> None:
    """Patterns, plain queries, ports, names with @, lists, expressions and mail addresses."""
    plain = """s3://b/part-?.txt s3://b/part-?[0-9]{a,b}.txt https://host:8080/a https://h/a?download=true s3://b/x@y
    file:///mnt/me@corp/x /data/me@corp/x me@corp.org @flags.txt layers.*:0.1 regex:a(?=b) 0:0.5/0.5 a/b:c@d
    s3://b/token=1/x.txt 2:a@b localhost:8080 https://h/a?versionId=1""".split()
    check_addresses(plain)
    assert [without_credentials(word) for word in plain] == plain


def refusal(argv: Sequence[str]) -> str:
    with pytest.raises(UsageError) as refused:
        parse(argv)
    return str(refused.value)


@pytest.mark.parametrize(
    "used", [["--dataset_source=random"], ["--vocab_size=wrong", "--dry_run=1"]]
)
def test_every_option_of_a_run(used: list[str]) -> None:
    """All spellings and kinds of value, with and without a use for it, beside other mistakes
    too."""
    for name in OPTIONS:
        assert RULE in (said := refusal([*used, f"--{name}={ADDRESS}"])) and SECRET not in said, (
            name
        )


def test_every_place_of_a_command_line(tmp_path: Path) -> None:
    """Words after a flag, before any, unknown flags, other programs' flags, files of flags and
    their names."""
    flags = tmp_path / "flags"
    flags.write_text(f"--data_path '{ADDRESS}'")
    places: list[list[str]] = [
        ["--data_path", "0.5", "a", "0.5", ADDRESS],
        ["--data-path", ADDRESS],
        ["-data_path", ADDRESS],
        [ADDRESS],
        ["--lr=1", ADDRESS],
        [f"--nothing_like_it={ADDRESS}"],
        ["--nothing_like_it", ADDRESS],
        [f"--{ADDRESS}"],
        [f"--load-checkpoint={ADDRESS}"],
        [f"--trainer.load_checkpoint_path={ADDRESS}"],
        [f"--wandb_api_key={ADDRESS}"],
        [f"--data_path={ADDRESS} --lr=1"],
        [f"'--data_path={ADDRESS}'"],
        [f"--data_path=[{ADDRESS},b]"],
        [f"--data_path={'x' * 40},{ADDRESS}"],
        [f"@{flags}"],
    ]
    for words in places:
        assert RULE in (said := refusal(words)) and SECRET not in said, words
    for words in ([f"@{ADDRESS}"], [f"--lr=@{ADDRESS}"], [f"!include {ADDRESS}"]):
        assert SECRET not in refusal(words), words


def test_a_declared_secret_may_hold_an_address() -> None:
    """Its value goes to the callback only."""
    variables = json.dumps({"STORE": ADDRESS})
    for words in ([f"--export_callback_env={variables}"], ["--export_callback_env", variables]):
        arguments = parse(
            [*words, "--export_callback_script=x", "--vocab_size=32", "--dataset_source=random"]
        )
        assert arguments.environment == {"STORE": ADDRESS} and SECRET not in repr(arguments)


def typed_options(main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a program that take a value, and "" for its positional words."""
    parsers: list[ScriptParser] = []

    class Seen(Exception):  # noqa: N818
        pass

    def see(parser: ScriptParser, *_: Any) -> Any:
        parsers.append(parser)
        raise Seen

    with monkeypatch.context() as patch, pytest.raises(Seen):
        patch.setattr(ScriptParser, "parse_known_args", see)
        main([])
    return [
        (action.option_strings or [""])[-1] for action in parsers[-1]._actions if action.nargs != 0
    ]


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_option_of_every_program(
    module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of all words of a command line the first with a secret is answered, whatever else is
    wrong."""
    main = importlib.import_module(module).main
    options = typed_options(main, monkeypatch)
    assert options
    for option in options:
        for words in (
            ([f"{option}={ADDRESS}"], [option, ADDRESS])
            if option
            else ([ADDRESS], ["--x", ADDRESS])
        ):
            with pytest.raises(SystemExit) as ended:
                main(words)
            shown = "".join(capfd.readouterr())
            assert ended.value.code == 2 and RULE in shown and SECRET not in shown, words


def test_verbs_and_pictures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The word of a command, and the files of a schedule's picture."""
    monkeypatch.setattr("sys.argv", ["megatron_lite", ADDRESS])
    assert megatron_lite_command() == 2
    assert importlib.import_module("scripts.plot_schedule").main([f"--csv={ADDRESS}", *TINY]) == 2
    assert importlib.import_module("scripts.plot_schedule").main([f"--png={ADDRESS}", *TINY]) == 2
    assert SECRET not in "".join(capfd.readouterr())


def find_secret(folder: Path) -> list[Path]:
    """Return the files below a folder that hold the secret."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def test_nothing_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every text option in a run, a dry run and one that writes a job: exit 2, and exit.json has
    the refusal."""
    for number, name in enumerate(
        name for name, flag in FLAGS.items() if flag.is_text and not flag.secret
    ):
        root = tmp_path / str(number)
        more = [["--dry_run=1", f"--write_sbatch={tmp_path}/job"], ["--dataset_source=random"]][
            number % 2
        ]
        words = [*TINY, f"--experiment_dir={root}", *more, f"--{name}={ADDRESS}"]
        assert pretrain_gpt.main(words) == 2, name
        said = "".join(capfd.readouterr())
        assert RULE in said and SECRET not in said, name
        if number % 2 and name != "experiment_dir":
            assert RULE in (root / "exit.json").read_text(), name
    assert not find_secret(tmp_path) and not (tmp_path / "job").exists()


def test_starts_leak_nothing(tmp_path: Path) -> None:
    """The launcher, too: of two ranks started by hand, and of an address in an older run that is
    shown and resumed."""
    refused = run([*TINY, f"--experiment_dir={tmp_path / 'a'}", f"--data_path={ADDRESS}"], ranks=2)
    assert refused.codes == [2, 2] and RULE in refused.output and SECRET not in refused.output
    assert not find_secret(tmp_path)
    succeed(
        [
            *TINY,
            f"--experiment_dir={tmp_path / 'b'}",
            "--stop_interval=2",
            "--checkpoint_interval=1",
        ]
    )
    path = tmp_path / "b" / "config.json"
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "dataset_cache": ADDRESS, "data_path": [ADDRESS]}
        )
    )
    assert (
        importlib.import_module("megatron_lite.commands.report_run").main(
            [str(tmp_path / "b")], None
        )
        == 0
    )
    assert "https://..." in (tmp_path / "b" / "report.html").read_text() and find_secret(
        tmp_path
    ) == [path]
    resumed = succeed([*TINY, f"--experiment_dir={tmp_path / 'b'}"])
    assert SECRET not in resumed.output and not find_secret(tmp_path)
