"""Another order, cut or division of the same data at a resume: accepted where nothing is lost, else
with its price."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.compatibility import check_data
from megatron_lite.cli import prepare_data
from megatron_lite.config import unflatten
from megatron_lite.data.fingerprint import identity
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.sampling import SampleOrder, StreamSampler
from tests.support.launch import TINY, run, succeed
from tests.support.token_files import write_counting

FLAGS = [*TINY, "--dataset_source=list", "--split=1,0,0", "--num_workers=0", "--vocab_size=1000"]


@pytest.mark.parametrize(
    ("before", "after", "first", "is_same"),
    [
        (SampleOrder("epoch"), SampleOrder("none"), 0, False),
        (SampleOrder("none"), SampleOrder("epoch"), 1, False),
        (SampleOrder("skip_first_epoch"), SampleOrder("none"), 0, True),
        (SampleOrder("skip_first_epoch"), SampleOrder("none"), 1, False),
        (SampleOrder("epoch"), SampleOrder("skip_first_epoch"), 1, True),
        (SampleOrder("epoch"), SampleOrder("full", epochs=2), 0, False),
        (SampleOrder("full", epochs=3), SampleOrder("none"), 1, False),
    ],
    ids=str,
)
def test_the_price_is_that_of_the_samples(
    before: SampleOrder, after: SampleOrder, first: int, is_same: bool, tmp_path: Path
) -> None:
    """The samplers agree with what is said: the share of what follows in the epoch that was read,
    or no change."""
    cycle = max(order.epochs if order.shuffle == "full" else 1 for order in (before, after))
    samplers = [StreamSampler(1000 * 16 + 1, 16, 7, order) for order in (before, after)]
    begin = first * 1000 * cycle
    done = first * 1000 * cycle + 400 * cycle
    end = (first + 1) * 1000 * cycle
    read, coming = (
        set(zip(*(part.tolist() for part in sampler.places(np.arange(*span))), strict=True))
        for sampler, span in zip(samplers, ((begin, done), (done, end)), strict=True)
    )
    share = len(read & coming) / len(coming)
    row = [60, 16001, "uint16", "0" * 16]
    data = {"sets": [row], "tokenizer": None}
    counts = {"stages": [[0, 8, 16]], "sets": [["0" * 16, "a", 1000, 16, done]]}
    options = [
        dict(
            data_path=("a",),
            batch_size=8,
            sequence_length=16,
            train_iters=9000,
            shuffle=order.shuffle,
        )
        | ({"max_epochs": order.epochs} if order.shuffle == "full" else {})
        for order in (before, after)
    ]
    saved = manifest.Manifest(
        "0" * 16, done // 8, 1, options[0], {"data": data, "counts": counts}, {}, {}
    )
    lines = check_data(saved, unflatten({**options[1], "allow_data_change": True}), data, "here")
    assert (not lines) == is_same == (share == 0)
    for line in lines:
        (said,) = re.findall(r"about ([0-9.]+)% of the rest of this epoch was already read", line)
        assert float(said) / 100 == pytest.approx(share, abs=0.05)
        assert (
            f"to lose at most 0 samples, keep the old value until the epoch ends (--stop_interval={end // 8})"
            in line
        )
    for at, count, era, is_known in (
        (end, end, None, True),
        (end, end - 8, None, False),
        (end, end, 100, False),
    ):
        sets = [["0" * 16, "a", 1000, 16, count]]
        saved = manifest.Manifest(
            "0" * 16, at // 8, 1, options[0], {"data": data, "counts": {"sets": sets}}, {}, {}
        )
        now = unflatten({**options[1], "shuffle_era": era, "allow_data_change": True})
        lines = check_data(saved, now, data, "here")
        plain = f"--shuffle: {before.shuffle} in the checkpoint, {after.shuffle} now"
        # Where other starts had other options, or within windows, the place in the epoch is not
        # known.
        assert lines[:1] == ([] if is_known else [plain])


def test_an_order_may_change_between_epochs(tmp_path: Path) -> None:
    """The message says where; what is cut in another way has its price everywhere."""
    prefix = write_counting(tmp_path / "x", [12] * 32 + [1], "<u2", 0)
    flags = [
        *FLAGS,
        "--sequence_length=16",
        "--batch_size=4",
        "--train_iters=12",
        f"--data_path={prefix}",
    ]
    flags += [f"--experiment_dir={tmp_path / 'run'}"]
    succeed([*flags, "--checkpoint_interval=3", "--stop_interval=6"])
    refused = run([*flags, "--shuffle=none", "--truncate_documents=0", "--resume_iteration=3"])
    assert (
        refused.codes == [4]
        and "--shuffle: epoch in the checkpoint, none now: about 50.0%" in refused.output
    )
    assert (
        "to lose at most 0 samples, keep the old value until the epoch ends (--stop_interval=6)"
        in refused.output
    )
    assert "0 now: about 50.0% of the rest of this epoch was already read, and as" in refused.output
    succeed([*flags, "--shuffle=none", "--stop_interval=7"])


def test_shards_of_the_same_data(tmp_path: Path) -> None:
    """They are other samples, so a resume is refused; the message has the command that joins them
    to the same pair."""
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": "words " * n}) + "\n" for n in range(1, 40))
    )
    for more in (
        ["--output_prefix", f"{tmp_path}/whole"],
        ["--shards=3", "--output_prefix", f"{tmp_path}/part"],
    ):
        assert prepare_data.main([f"{tmp_path}/x.jsonl", *more]) == 0

    def changes(*names: str) -> list[str]:
        """The changes from the whole pair to these."""
        before, now = ([f"{tmp_path}/{name}" for name in some] for some in (["whole"], names))
        data, other = (identity(list(map(IndexedDataset, some)), None) for some in (before, now))
        saved = manifest.Manifest("0" * 16, 5, 1, {"data_path": before}, {"data": data}, {}, {})
        return check_data(
            saved,
            unflatten({"data_path": tuple(now), "train_iters": 9, "allow_data_change": True}),
            other,
            "here",
        )

    shards = [f"part-{number:05d}-of-00003" for number in range(3)]
    *_, line = changes(*shards)
    said, command = line.split(": prepare_data ")
    assert said == "if these 3 are its shards, join them for the samples of before"
    assert prepare_data.main(shlex.split(command.replace("<another>", f"{tmp_path}/joined"))) == 0
    assert changes("joined") == [] and not any(
        "are its shards" in line for line in changes(*shards[1:])
    )
