"""The race of whole programs: turns, ratios and failures with small programs, and one run with our
own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.indexed_dataset import IndexedDataset
from scripts.benchmarks import processor
from scripts.benchmarks.programs import __main__ as program
from scripts.benchmarks.programs import contestants
from scripts.benchmarks.programs.race import Command, Program, ProgramError, Race

pytestmark = [
    pytest.mark.benchmarks,
    pytest.mark.skipif(sys.platform != "linux", reason="programs are observed by /proc"),
]

ROOT = Path(__file__).resolve().parents[2]
# A "trainer" whose step takes a given time and whose loss is 1/step, until its folder has a file of
# the given name. Its child only waits, as a data worker does.
TRAINER = """
import os, subprocess, sys, time
step_s, step = float(sys.argv[1]), 0
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("starting")
while not os.path.exists(sys.argv[2]):
    time.sleep(step_s)
    step += 1
    print(f"step {step} loss {1 / step}")
child.kill()
raise ValueError("it is over")
"""


def command(folder: Path, step_s: float, until: str = "never") -> Command:
    words = [sys.executable, "-c", TRAINER, str(step_s), until]
    return Command(words, folder, r"^step \d+ loss ([\d.e-]+)")


def race_of(folder: Path, turns: int, **commands: Command) -> Race:
    return Race(commands, folder, timeout_s=20, turns=turns, steps_per_turn=5)


def test_programs_take_turns_and_only_one_runs(tmp_path: Path) -> None:
    """Steps are counted and timed per turn, and the slower program takes longer, at any load of the
    machine."""
    race = race_of(tmp_path, 3, ours=command(tmp_path, 0.01), slow=command(tmp_path, 0.06))
    for turns, _ in enumerate(race.run(), start=1):
        # Two steps at the start, then per turn one that does not count and five that do (and more
        # until the stop).
        for one in race._programs.values():
            assert len(one.losses) >= 2 + 6 * turns
    rows = race.rows("ours", {})
    # A program stands still in the middle of a step, so that a turn may hold a little less than its
    # steps.
    assert 0.005 < rows["ours"]["step_s"]["median"] < rows["slow"]["step_s"]["median"]
    ratio = rows["ours"]["ratios"]["slow"]
    assert (
        0 < ratio["median"] < 1
        and set(rows["ours"]["ratios"]) == {"slow"}
        and rows["slow"]["ratios"] == {}
    )
    assert len(ratio["values"]) == 3 and rows["slow"]["start_s"] > 0 and not race.turns.failures
    for name, row in rows.items():
        losses = race._programs[name].losses
        assert losses == pytest.approx([1 / step for step in range(1, len(losses) + 1)])
        assert row["peak_rss_bytes"] > 2**20


def test_a_stopped_program_stands_still_with_its_children(tmp_path: Path) -> None:
    """Not a step passes while it is stopped; killed, no process of it is left."""
    one = Program(command(tmp_path, 0.01), tmp_path / "err", timeout_s=20)
    one.steps(1)
    family = one._family()
    assert len(family) == 2
    one.stop()
    deadline = time.monotonic() + 10
    while [process_state(pid) for pid in family] != ["T", "T"] and time.monotonic() < deadline:
        time.sleep(0.01)
    one.stop()  # reads what was printed before it stood still
    before = len(one.losses)
    time.sleep(0.1)
    assert [process_state(pid) for pid in family] == ["T", "T"] and not one._selector.select(0.0)
    one.go_on()
    one.steps(1)
    assert len(one.losses) > before
    one.kill()
    deadline = time.monotonic() + 10
    while any(process_state(pid) not in "ZX" for pid in family) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(process_state(pid) in "ZX" for pid in family)


def process_state(pid: int) -> str:
    """Return T for a stopped process, Z or X for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_a_program_that_dies_does_not_stop_the_others(tmp_path: Path) -> None:
    """Its reason is saved, its later turns do not count, and ratios are those of the rounds
    before."""
    race = race_of(
        tmp_path,
        3,
        ours=command(tmp_path, 0.005),
        dies=command(tmp_path, 0.005, until="the first round"),
    )
    for _ in race.run():
        (tmp_path / "the first round").touch()
    rows = race.rows("ours", {})
    assert "ValueError: it is over" in race.turns.failures["dies"]
    assert (
        len(rows["ours"]["ratios"]["dies"]["values"]) == 1
        and len(rows["ours"]["step_s"]["values"]) == 3
    )


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        (
            "print('starting'); time.sleep(60)",
            0.5,
            r"no step within 0\.5 s; (starting|it said nothing)",
        ),
        # Its steps would be timed, but they are no training.
        (
            "print('step 1 loss 2.5\\nstep 2 loss nan\\nstep 3 loss nan'); time.sleep(60)",
            20,
            "loss nan at step 2",
        ),
        # A report is published; the folders of the machine that wrote it are not.
        (
            "sys.stderr.write('/home/me/peer/train.py:5: step 1/2 and/or 3\\n')",
            20,
            r"ended with exit code 0; train\.py:5: step 1/2 and/or 3",
        ),
    ],
    ids=["no step", "not a number", "folders"],
)
def test_programs_that_fail(code: str, timeout_s: float, message: str, tmp_path: Path) -> None:
    """A program without a step fails in time, one without a finite loss at once; no folder is
    named."""
    words = [sys.executable, "-c", f"import sys, time; {code}"]
    one = Program(
        Command(words, tmp_path, r"^step \d+ loss ([\d.]+|nan|inf)"), tmp_path / "err", timeout_s
    )
    with pytest.raises(ProgramError, match=f"^{message}$"):
        one.steps(3)
    assert one._family() == []


def test_a_peer_is_compared_with_the_program_of_ours_that_computes_the_same(tmp_path: Path) -> None:
    """nanoGPT's gelu is exact, so its ratio is that of our exact gelu, which exists beside nanoGPT
    only."""
    assert (
        set(contestants.COMPARED_WITH)
        <= set(contestants.PROGRAMS)
        >= set(contestants.COMPARED_WITH.values())
    )
    names = ("ours", "exact", "peer", "exact_peer")
    race = race_of(tmp_path, 1, **{name: command(tmp_path, 0.001) for name in names})
    for _ in race.run():
        pass
    rows = race.rows("ours", {"exact_peer": "exact"})
    assert {name: set(row["ratios"]) for name, row in rows.items() if row["ratios"]} == {
        "ours": {"exact", "peer"},
        "exact": {"exact_peer"},
    }


def test_exact_gelu_races_beside_nanogpt_only(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    nanogpt, llama = f"--nanogpt={tmp_path}", "--model=llama-39m"
    for words, runs in (([], False), ([nanogpt], True), ([llama, nanogpt], False)):
        options = program.parse([*TINY.split(), "--only=megatron_lite*,nanoGPT", *words])
        commands, _ = program.commands_of(options, tmp_path)
        exact = commands.get("megatron_lite exact gelu", Command([], tmp_path, ""))
        assert ("--activation_type=gelu_exact" in exact.words) == runs == ("nanoGPT" in commands)


# What nanoGPT does with a GPU, and says of the CPU that it gets instead.
GPU_PROGRAM = """
import torch
weight = torch.ones(8, 8).to("cuda").requires_grad_()
with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
    print((weight @ weight).dtype, weight.device, torch.backends.mkldnn.matmul.fp32_precision)
"""


def test_nanogpt_is_told_that_the_cpu_is_a_gpu_where_it_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helped (fused AdamW, our library) and in bf16, which computes in bf16 then; otherwise it runs
    as it is."""
    (tmp_path / "train.py").write_text(GPU_PROGRAM)
    monkeypatch.setattr(contestants, "library_for", lambda wanted: "onednn")
    helped: list[str] = []
    for dtype, name, through in (
        ("fp32", "nanoGPT", False),
        ("fp32", "nanoGPT helped", True),
        ("bf16", "nanoGPT", True),
    ):
        options = program.parse(
            [*TINY.split(), f"--nanogpt={tmp_path}", f"--only={name}", f"--dtype={dtype}"]
        )
        (made,) = program.commands_of(options, tmp_path)[0].values()
        assert (
            [word.endswith("on_cpu.py") for word in made.words[1:2]]
            == [through]
            == ["--device=cuda" in made.words]
        )
        assert ("--onednn" in made.words) == (name == "nanoGPT helped")
        helped = made.words if "--onednn" in made.words else helped
    said = subprocess.run(helped, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.split() == ["torch.bfloat16", "cpu", "bf16"]


def test_instruction_sets_are_read_from_what_the_libraries_print() -> None:
    """Lines of torch 2.13 with oneDNN 3.12 and MKL 2024 with everything, and with AVX2 only;
    nothing known without."""
    text = (
        "torch AVX512\n"
        "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture Intel(R) Advanced "
        "Vector Extensions 512 (Intel(R) AVX-512) with support for INT8, BF16, Lnx 2.30GHz lp64 gnu_thread\n"
        "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost\n"
    )
    found = processor.instruction_sets_in(text)
    assert found["torch"] == "AVX512" and found["oneDNN"] == "AVX-512 with Intel DL Boost"
    assert found["MKL"].startswith("AVX-512")
    mkl = "MKL_VERBOSE oneMKL for Intel(R) 64 architecture Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) "
    assert (
        processor.instruction_sets_in(f"torch AVX2\n{mkl}enabled processors, Lnx 2.30GHz\n")["MKL"]
        == "AVX2"
    )
    assert set(processor.instruction_sets_in("").values()) == {processor.UNKNOWN}


def test_the_environment_of_avx2_reaches_torch() -> None:
    assert processor.instruction_sets(processor.AVX2)["torch"] in ("AVX2", "DEFAULT")


def test_inputs_hold_the_same_tokens(tmp_path: Path) -> None:
    """Every format holds one stream of tokens below the vocabulary size; pairs of bytes use much of
    a large one."""
    for vocab_size in (256, 16384):
        contestants.write_inputs(tmp_path, vocab_size)
        tokens = np.fromfile(tmp_path / "train.bin", dtype="<u2")
        assert (
            tokens.size > 100_000 and tokens.max() < vocab_size and len(set(tokens.tolist())) > 90
        )
        dataset = IndexedDataset(str(tmp_path / "ours"))
        ours = np.concatenate([dataset.document(number) for number in range(dataset.num_documents)])
        assert np.array_equal(ours, tokens)
    assert (tmp_path / "meta.pkl").read_text() == "(dS'vocab_size'\nI16384\ns."


TINY = "--num_layers=1 --hidden_size=32 --num_attention_heads=2 --head_groups=2 --ffn_hidden_size=64 --sequence_length=32"


def test_our_program_races_and_missing_peers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without checkouts and packages only our row trains; the others say what they lack, and the
    exit code is 0."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    output = tmp_path / "results.json"
    words = [
        *TINY.split(),
        "--turns=2",
        "--steps_per_turn=10",
        "--threads=1",
        "--isa=avx2",
        f"--output={output}",
    ]
    python = tmp_path / "python"  # an interpreter without the peers' packages
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    assert program.main([*words, f"--python={python}"]) == 0
    printed = capsys.readouterr().out
    result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    assert list(result["rows"]) == ["megatron_lite"] and result["failures"] == {}
    row = result["rows"]["megatron_lite"]
    assert row["steps"] >= 10 and row["loss"] < 6 and row["start_s"] > 0
    assert "no checkout" in result["missing"]["nanoGPT"]
    assert "litgpt is not installed" in result["missing"]["litgpt"]
    assert "threads: 1, 2 x 32 tokens" in printed and "| megatron_lite |" in printed
    assert result["settings"]["isa"] == "avx2"


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_trainer_trains(tmp_path: Path) -> None:
    """Our script around Hugging Face's Trainer prints a line per step."""
    options = program.parse([*TINY.split(), "--only=HF Trainer"])
    contestants.write_inputs(tmp_path, options.vocab_size)
    commands, unavailable = program.commands_of(options, tmp_path)
    assert not unavailable
    one = Program(commands["HF Trainer"], tmp_path / "err", timeout_s=100)
    one.steps(3)
    one.kill()
    assert 4 < one.losses[0] < 7


@pytest.mark.slow
def test_a_terminated_race_leaves_no_programs(tmp_path: Path) -> None:
    """SIGTERM, which `timeout` sends, ends the stopped programs, too."""
    words = [
        "-m",
        "scripts.benchmarks.programs",
        *TINY.split(),
        "--only=megatron_lite",
        "--turns=1000",
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    race = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert race.stderr is not None
    for line in race.stderr:
        if re.match(r"benchmark: turn 1:", line):
            break
    race.send_signal(signal.SIGTERM)
    race.wait(30)
    race.stderr.close()
    deadline = time.monotonic() + 10
    while left := [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _bytes(path)
    ]:
        assert time.monotonic() < deadline, left
    assert not list(tmp_path.iterdir())


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
