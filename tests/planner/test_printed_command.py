"""The command that a dry run prints: its words, and read back, for configurations that a seed
draws."""

import re
import shlex

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config
from megatron_lite.config.values import written
from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.command import changed_words, launcher, layout_of_nodes, quoted
from megatron_lite.planner.devices import GIB
from megatron_lite.planner.plan import Planner
from megatron_lite.validation import resolve
from pretrain_gpt import main
from tests.support.harness import TINY
from tests.support.launch import run
from tests.support.memory_meters import some
from tests.support.random_configurations import Drawn, draw_configurations

pytestmark = pytest.mark.usefixtures("shared_planners")

DRAWN = draw_configurations(12)
# The same on two times as many ranks, two to a layer.
SHARED = [
    Drawn(2 * ranks, {**options, "tensor_parallel": 2, "sequence_tensor_parallel": number % 2 == 1})
    for number, (ranks, options) in enumerate(DRAWN)
]
MOST_RANKS = 4  # that a test starts
LESS = 0.8  # of what the activations and the state need: the runtime stays


def command_of(page: str) -> tuple[int, list[str]]:
    """Return the ranks and the flags of the command at the end of a page."""
    launcher, _, flags = page.rpartition("run this")[2].partition("pretrain_gpt.py")
    numbers = dict(re.findall(r"--(nnodes|nproc-per-node)=(\d+)", launcher))
    ranks = int(numbers.get("nnodes", 1)) * int(numbers.get("nproc-per-node", 1))
    return ranks, shlex.split(flags.replace("\\\n", " "))


def resolved(flags: list[str], ranks: int, device_bytes: int) -> Config:
    """Return the options of a run, without `auto`."""
    config = resolve(parse(flags).config, ranks)
    assert not config.distributed.dry_run
    assert resolve_auto(config, ranks, "cpu", device_bytes)[0] == config
    return config


def printed(drawn: Drawn, device_bytes: int, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the page of a dry run on a CPU with this much memory for a rank."""
    options = {**TINY, **drawn.options}
    flags = [f"--{name}={written(value)}" for name, value in options.items() if value is not None]
    gib = f"--device_memory_gib={device_bytes / GIB!r}"
    assert main([*flags, "--dry_run=1", f"--world_size={drawn.ranks}", gib, *more]) == 0
    return capsys.readouterr().out


def too_little(drawn: Drawn) -> int:
    """Return less memory than the run needs as drawn."""
    plan = Planner(drawn.ranks, "cpu").plan(drawn.config())
    needed, beside = plan.needed_bytes(), sum(plan.runtime.values())
    return int(beside + LESS * (needed - beside))


@pytest.mark.parametrize("drawn", some([*DRAWN, *SHARED], each=16))
def test_the_printed_flags_fit(drawn: Drawn, capsys: pytest.CaptureFixture[str]) -> None:
    """On a device with too little memory for the run as drawn, or with just enough, the plan of the
    printed flags fits, trains the same model on the same batch, and is what a dry run of them
    says."""
    needed = Planner(drawn.ranks, "cpu").plan(drawn.config()).needed_bytes()
    for device_bytes in (too_little(drawn), needed + 2**20):
        page = printed(drawn, device_bytes, capsys)
        if "run this" not in page:  # nothing fits
            assert device_bytes < needed and "no flags fit" in " ".join(page.split()), page[-2000:]
            continue
        ranks, command = command_of(page)
        config = resolved(command, ranks, device_bytes)
        assert Planner(ranks, "cpu").plan(config).needed_bytes() <= device_bytes
        assert ("\nfits: " in page) == (needed <= device_bytes) and ranks == drawn.ranks
        assert (
            config.model == drawn.config().model
            and config.batch.batch_size == drawn.options["batch_size"]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "drawn", [drawn for drawn in [*DRAWN, *SHARED] if drawn.ranks <= MOST_RANKS], ids=str
)
def test_the_printed_command_runs(drawn: Drawn, capsys: pytest.CaptureFixture[str]) -> None:
    """The run as drawn does not fit; the printed flags train two iterations, as many ranks as the
    launcher says."""
    page = printed(drawn, too_little(drawn), capsys, "--train_iters=2")
    assert "does not fit" in page and "run this" in page
    ranks, command = command_of(page)
    done = run(command, ranks)
    assert done.codes == [0] * ranks and "training complete: 2 iterations" in done.output, (
        done.output
    )


def test_command_lines() -> None:
    """Flags of the plan go, changed ones move to the end, values with spaces are quoted, @files
    stay."""
    argv = shlex.split(
        "--lr 0.1 --zero-stage=1 --dry_run=1 --world_size 8 --data_path 'a b' c --gpu=h200"
    )
    words = changed_words(argv, {"zero_stage": 3, "num_grad_buffers": None})
    assert words == ["--lr", "0.1", "--data_path", "a b", "c", "--zero_stage=3"]
    assert (
        quoted(["python", "x.py", *words])
        == "python x.py --lr 0.1 --data_path 'a b' c --zero_stage=3"
    )
    files = changed_words(
        ["@model.flags", "--dry_run=1"], {"num_grad_buffers": None, "split_master_weights": False}
    )
    assert files == ["@model.flags", "--num_grad_buffers=none", "--split_master_weights=0"]
    assert (
        parse([*files[1:], "--dataset_source=random"]).config.multi_stage.num_grad_buffers is None
    )


def test_nodes() -> None:
    """As few nodes as hold equal numbers of ranks, and whole tensor-parallel groups, if a node
    holds one."""
    for ranks, nodes in (
        (1, (1, 1)),
        (8, (1, 8)),
        (16, (2, 8)),
        (12, (2, 6)),
        (7, (1, 7)),
        (11, (11, 1)),
    ):
        assert layout_of_nodes(ranks) == nodes
        assert (launcher(*nodes)[0] == "python") == (ranks == 1)
        assert any(word.startswith("--nnodes") for word in launcher(*nodes)) == (nodes[0] > 1)
    assert [layout_of_nodes(ranks, 4) for ranks in (4, 8, 12, 24)] == [
        (1, 4),
        (1, 8),
        (3, 4),
        (3, 8),
    ]
    assert layout_of_nodes(16, 16) == (2, 8)
    assert launcher(*layout_of_nodes(12, 4))[1:3] == ["--nnodes=3", "--nproc-per-node=4"]
