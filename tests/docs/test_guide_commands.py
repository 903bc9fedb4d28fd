"""The commands of the guides on weights, exports and generation run as written, on a made-up
model."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import documents

pytestmark = pytest.mark.guides

GUIDES = ("pretrained", "adapters", "exports", "generation", "models")
MODEL = "--num_layers=1 --hidden_size=16 --num_attention_heads=2 --vocab_size=257 --use_rotary_embeddings=1 --gated=1"
MODEL += " --activation_type=silu --normalization_type=rms_norm --add_linear_biases=0 --tie_word_embeddings=0"
TRAIN = f"pretrain_gpt.py {MODEL} --data_path=data/mine --sequence_length=64 --batch_size=2 --train_iters=2"
# Smaller sizes, and words for the dots of a command that is only sketched. Nothing else of a
# command is changed.
SMALLER = {
    "--nproc-per-node=8": "--standalone --nproc-per-node=2",
    "--sequence_length=4096": "--sequence_length=64",
    "--train_iters=1000": "--train_iters=2",
    "--batch_size=64": "--batch_size=2",
    "torchrun ... pretrain_gpt.py ...": f"python {TRAIN} --experiment_dir=runs/samples",
    "--sample_interval=500": "--sample_interval=1 --sample_tokens=2",
    "docs/*.md": "more.jsonl",
    "check_mup.py ": "check_mup.py --widths 16 32 ",
    "--rates 0.001 0.002 0.004 0.008 0.016": "--rates 0.002 0.004",
    "--train_iters=60": "--train_iters=4",
    "--prompt ": "--max_new_tokens 4 --prompt ",
    "--prompts_file ": "--max_new_tokens 4 --prompts_file ",
}
# the first needs the network, the second takes minutes
NOT_RUN = ("hf download ", "python -m scripts.benchmarks.")


def commands(guide: str) -> list[str]:
    """The commands of a guide: blocks, indented lines and code within sentences."""
    text = documents.read(guide)
    found = [
        line for block in documents.blocks(text) for line in block.replace("\\\n", "").splitlines()
    ]
    found += re.findall(r"^    (python .*)$", text, re.M)
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found += [
        " ".join(code.split())
        for code in re.findall(r"`((?:python|torchrun) [^`]*)`", without_blocks)
    ]
    return [command for command in found if not command.startswith(NOT_RUN)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with data and a trained model under the names that the guides use."""
    tmp_path = documents.make_checkout(tmp_path_factory.mktemp("guides"))
    texts = [
        {"text": f"Once upon a time there were {number} models. " * 20} for number in range(20)
    ]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (tmp_path / "held_out").mkdir()
    for path in ("held_out.txt", "held_out/a.txt"):
        (tmp_path / path).write_text("Then they were trained.\n")
    (tmp_path / "prompts.txt").write_text("Once\nThen\n")
    documents.run("python scripts/prepare_data.py more.jsonl --output_prefix data/mine", tmp_path)
    experiment = (
        "--tokenizer_file=data/mine.tokenizer.json --experiment_dir=runs/mine --export_interval=2"
    )
    documents.run(f"python {TRAIN} --max_position_embeddings=4096 {experiment}", tmp_path)
    export = tmp_path / "runs" / "mine" / "export"
    (export / "2").rename(export / "1000")
    for name in ("mistral-7b", "Mistral-7B", "models/base"):
        shutil.copytree(export / "1000", tmp_path / name)
    shutil.copy(tmp_path / "data" / "mine.tokenizer.json", tmp_path / "tokenizer.json")
    for ending in ("bin", "idx"):
        shutil.copy(tmp_path / "data" / f"mine.{ending}", tmp_path / f"corpus.{ending}")
    return tmp_path


def run_commands(guide: str, prepared: Path, folder: Path) -> None:
    """Run the commands of a guide in a copy of the checkout."""
    shutil.copytree(prepared, folder, symlinks=True)
    if guide == "exports":
        shutil.copytree(folder / "runs" / "mine" / "checkpoints", folder / "run" / "checkpoints")
    found = commands(guide)
    assert (
        len(found)
        == {"pretrained": 1, "adapters": 3, "exports": 3, "generation": 8, "models": 3}[guide]
    )
    for command in found:
        command = documents.smaller(command, SMALLER)
        assert "..." not in command
        if "--format=gguf" in command and find_spec("gguf") is None:
            continue
        documents.run(command, folder)


def test_commands_of_the_guides_run(prepared: Path, tmp_path: Path) -> None:
    """Every command of each guide ends well, in its order, on small sizes and without the
    network."""
    with ThreadPoolExecutor(len(GUIDES)) as pool:
        list(pool.map(lambda guide: run_commands(guide, prepared, tmp_path / guide), GUIDES))
