"""A run with validation and test data of its own, from text and from pairs, and a resume with other
such data."""

from pathlib import Path

import pytest

from megatron_lite.cli import prepare_data
from tests.support.launch import TINY, run, succeed
from tests.support.metrics import read_metrics
from tests.support.token_files import save_byte_tokenizer


def test_from_prepared_text_to_named_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """prepare_data prints the flags of its held-out documents; beside them a folder of text; a
    resume warns once."""
    corpus = tmp_path / "corpus.jsonl"
    other = tmp_path / "other"
    tokenizer = tmp_path / "tokenizer.json"
    corpus.write_text(
        "".join(f'{{"text": "number {number} of many, {number % 7}"}}\n' for number in range(200))
    )
    other.mkdir()
    (other / "x.txt").write_text("entirely different text " * 40)
    save_byte_tokenizer(str(tokenizer))
    prefix = str(tmp_path / "data")
    assert (
        prepare_data.main([str(corpus), f"--output_prefix={prefix}", "--validation_documents=40"])
        == 0
    )
    printed = capsys.readouterr().out.splitlines()[-1].split()
    assert printed[2:] == [
        "--data_path",
        prefix,
        f"--valid_data_path={prefix}_validation",
        "--validation_iters=all",
    ]
    first = [
        *TINY,
        "--dataset_source=list",
        "--num_workers=0",
        "--vocab_size=320",
        f"--tokenizer_file={tokenizer}",
    ]
    first += [
        f"--experiment_dir={tmp_path / 'run'}",
        "--checkpoint_interval=2",
        "--validation_interval=2",
    ]
    outcome = succeed([*first, *printed[2:], "--train_iters=2"], 2)
    assert f"{prefix}_validation: 40 documents" in outcome.output
    both = [
        f"--valid_data_path={prefix}_validation {other}",
        "--test_iters=1",
        f"--test_data_path={other}",
    ]
    second = [*first, "--data_path", prefix, *both, "--validation_iters=all", "--train_iters=4"]
    (refused,) = run([*second, "--keep_best=validation_loss/x"]).stderrs[0].splitlines()
    assert (
        "--keep_best=validation_loss/x: write validation_loss, or after / one of data_validation, other"
        in refused
    )
    outcome = succeed([*second, "--keep_best=validation_loss/other", "--export_format=distributed"])
    assert outcome.stdouts[0].count("are not comparable with earlier ones") == 1  # the test is new
    assert f"found {other}" in outcome.output and "resumed from" in outcome.output
    lines = {
        (line["phase"], line["iteration"]): line
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
    }
    assert "loss/data_validation" not in lines["validation", 2]  # one set has no name
    last = lines["validation", 4]
    assert (
        last["loss/data_validation"] < last["loss"] < last["loss/other"]
        and "loss/other" not in lines["test", 4]
    )
    assert f" | other: {last['loss/other']:.5f}" in outcome.output
    assert (
        f"best validation_loss/other: {last['loss/other']:.5f} at iteration 4, 0 validations"
        in outcome.output
    )
    assert [path.name for path in (tmp_path / "run" / "export" / "best").iterdir()] == ["4"]
