"""Adapters beside peft: gradients, folders in both directions, merged models.

Each run starts from adapters that peft wrote, with random A and B, so that neither gradient is zero.
"""

import importlib.util
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lite.commands import convert_checkpoint
from megatron_lite.errors import CheckpointError
from megatron_lite.generation import tasks
from megatron_lite.generation.model import load_model as load_local
from megatron_lite.model.gpt import parameters_of
from megatron_lite.outputs.huggingface_export import _base_of
from tests.huggingface.test_families import UNBALANCED, batches, config_of, flags, train
from tests.support.families import FAMILIES, load_model, logits_of, random_tokens, write_folder
from tests.support.harness import run_distributed

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it
NAMES = tuple({name.partition(",")[0]: name for name in reversed(FAMILIES)}.values())
DENSE = [name for name in NAMES if "num_experts_per_tok" not in FAMILIES[name]]
EXPERTS = [name for name in NAMES if name not in DENSE]
FEW = ("llama", "gpt2", "phi3", "gpt_neox")
RATE = 0.5


def linear_names(model: Any) -> list[str]:
    """All linear layers of the blocks."""
    kinds = (torch.nn.Linear, __import__("transformers").pytorch_utils.Conv1D)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and not name.endswith(("lm_head", "embed_out"))
    ]


def adapted(folder: Path, **options: Any) -> Any:
    """The folder's model with random adapters."""
    model = load_model(folder)
    options = {"target_modules": linear_names(model), "r": 3, "lora_alpha": 5} | options
    found = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    return found


def run(folder: Path, adapter: Path, experiment: Path, *more: str, ranks: int = 1) -> Path:
    """Train one iteration of SGD; return the folder of exports."""
    sgd = (
        "--optimizer=sgd",
        "--sgd_momentum=0",
        "--clip_grad=0",
        f"--lr={RATE}",
        "--weight_decay=0",
    )
    once = ("--train_iters=1", "--export_interval=1", "--export_merged=1")
    more = (f"--pretrained_adapter={adapter}", *sgd, *once, *more)
    run_distributed(ranks, train, flags(folder, experiment, *more))
    return experiment / "export"


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n.partition(",")[0] in FEW else [pytest.mark.slow])
        for n in DENSE
    ],
)
def test_gradients_and_folders_equal_peft(name: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / "model")
    targets = {"target_modules": linear_names(load_model(folder))}
    compare(folder, adapted(folder, use_rslora=name != DENSE[0], **targets), tmp_path, targets)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("mixtral", "attention gate_up_proj down_proj"),
        ("qwen3_moe", "gate_up_proj"),
        *(
            pytest.param(name, "attention down_proj gate_up_proj", marks=pytest.mark.slow)
            for name in EXPERTS
            if name not in ("mixtral", "qwen3_moe")
        ),
        pytest.param("qwen3_moe", "attention down_proj", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts_equal_peft(name: str, targets: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / "model")
    model = load_model(folder)
    found = [each for each in linear_names(model) if "self_attn" in each]
    options = dict(
        target_modules=found if "attention" in targets else [],
        target_parameters=[
            each
            for each, _ in model.named_parameters()
            if ".experts." in each and each.endswith(tuple(targets.split()))
        ],
    )
    assert options["target_parameters"]
    compare(folder, adapted(folder, **options), tmp_path, options, UNBALANCED)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("mixtral", ("q_proj",)),
        pytest.param("qwen3_moe", (), marks=pytest.mark.slow),
    ],
)
def test_adapters_by_expert_are_read(name: str, others: tuple[str, ...], tmp_path: Path) -> None:
    """The form of peft with transformers 4: two maps of an expert become one, of twice the rank."""
    folder, rank = write_folder(name, tmp_path / "model"), 2
    tensors: dict[str, Tensor] = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if ".experts." in module or module.endswith(others):
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                values = torch.randn(shape, generator=torch.Generator().manual_seed(len(tensors)))
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = 0.1 * values
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    found = {key.split(".lora_")[0].rpartition(".")[2] for key in tensors}
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 3}
    stated |= {"target_modules": sorted(found)}
    (adapter / "adapter_config.json").write_text(json.dumps(stated))

    oracle = peft.PeftModel.from_pretrained(load_model(folder), adapter).eval()
    expected = logits_of(oracle, random_tokens())
    assert convert(adapter, tmp_path / "merged", f"--base={folder}") == 0
    error = logits_of(load_model(tmp_path / "merged"), random_tokens()) - expected
    assert error.norm() < 3e-6 * expected.norm()
    export = run(folder, adapter, tmp_path / "run", *UNBALANCED)
    again = peft.PeftModel.from_pretrained(load_model(folder), export / "1").eval()
    trained, merged = (
        logits_of(each, random_tokens()) for each in (again, load_model(export / "merged" / "1"))
    )
    assert (trained - merged).norm() < 3e-6 * merged.norm()
    assert (trained - expected).norm() > 1e-3 * expected.norm()

    changed_config(adapter, use_rslora=True)
    with pytest.raises(RuntimeError, match="whose factor in peft depends on the version"):
        run(folder, adapter, tmp_path / "other", *UNBALANCED)
    changed_config(adapter, use_rslora=False)
    del tensors[next(key for key in tensors if ".experts.3." in key)]
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="the adapters of single experts are not alike"):
        run(folder, adapter, tmp_path / "other", *UNBALANCED)


def compare(
    folder: Path,
    oracle: Any,
    tmp_path: Path,
    targets: dict[str, list[str]],
    more: tuple[str, ...] = (),
) -> None:
    """Gradients and exports of a run from peft's adapters."""
    oracle.train().save_pretrained(tmp_path / "adapter")
    export = run(folder, tmp_path / "adapter", tmp_path / "run", *more)
    (tokens,) = list(batches(flags(folder, tmp_path / "run", "--train_iters=1")))[:1]
    logits = oracle(input_ids=tokens[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    before, after = weights(tmp_path / "adapter"), weights(export / "1")
    assert before.keys() == after.keys()
    for key, parameter in oracle.named_parameters():
        if parameter.requires_grad:
            key = key.replace(".default", "")
            gradient = (before[key] - after[key]) / RATE
            limit = max(1e-6, 4e-6 * float(parameter.grad.abs().max()))  # sums cancel
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=limit, msg=key)
    ours = peft.PeftModel.from_pretrained(load_model(folder), export / "1").eval()
    merged = load_model(export / "merged" / "1")
    exported = {key: value.clone() for key, value in merged.state_dict().items()}
    found, expected = (logits_of(each, random_tokens()) for each in (merged, ours))
    assert (found - expected).norm() < 3e-6 * expected.norm()
    for key, value in ours.merge_and_unload().state_dict().items():
        limit = 1e-6 if ".experts." in key else 0.0
        torch.testing.assert_close(exported[key], value, rtol=limit, atol=limit, msg=key)
    stated = json.loads((export / "1" / "adapter_config.json").read_text())
    assert stated["base_model_name_or_path"] == str(folder)
    for key in ("target_modules", "target_parameters"):
        assert {*(stated[key] or ())} == {*targets.get(key, ())}


def test_a_merge_rounds_once(tmp_path: Path) -> None:
    """bf16(fp32(W) + c B A), with fp32 adapters of a bf16 model: peft's bits."""
    folder = write_folder("llama", tmp_path / "model")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    export = run(folder, tmp_path / "adapter", tmp_path / "run", "--training_dtype=bf16")
    oracle = peft.PeftModel.from_pretrained(load_model(folder).bfloat16(), export / "1")
    found = load_file(export / "merged" / "1" / "model.safetensors")
    for key, value in oracle.merge_and_unload().state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, found[key]), key
    assert all(value.dtype == torch.float32 for value in weights(export / "1").values())


def convert(source: Path, target: Path, *more: str, kind: str = "huggingface") -> int:
    return convert_checkpoint.main(
        [f"--from={source}", f"--to={target}", f"--format={kind}", *more]
    )


def same_files(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (FEW[0], "--training_dtype=bf16 --ema_type=ema --ema_beta=0.5"),
        pytest.param(FEW[1], "--export_dtype=bf16", marks=pytest.mark.slow),
    ],
)
def test_adapters_are_merged_later(name: str, more: str, tmp_path: Path) -> None:
    """The bits of a merge during the run, from its checkpoint, and peft's from its export."""
    folder = write_folder(name, tmp_path / "model")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    export = run(folder, tmp_path / "adapter", tmp_path / "run", *more.split())
    exported = [word.replace("export_", "") for word in more.split() if "export_dtype" in word]
    assert convert(tmp_path / "run", tmp_path / "later", "--verify", *exported) == 0
    merged = export / "merged" / "1"
    assert same_files(merged, tmp_path / "later")
    config, expected = ((one / "config.json").read_text() for one in (tmp_path / "later", merged))
    assert config == expected
    if "ema" in more:
        averages = ("--weights=average", f"--base={folder}")
        assert convert(tmp_path / "run", tmp_path / "average", *averages) == 0
        assert not same_files(merged, tmp_path / "average")

    oracle = peft.PeftModel.from_pretrained(load_model(folder), export / "1").merge_and_unload()
    assert convert(export / "1", tmp_path / "of_peft", f"--base={folder}", "--verify") == 0
    found = load_file(tmp_path / "of_peft" / "model.safetensors")
    own = oracle.state_dict()
    assert all(torch.equal(own[key], value) for key, value in found.items())

    assert convert(tmp_path / "run", tmp_path / "0", kind="distributed") == 0  # fp32 weights
    assert convert(tmp_path / "0", tmp_path / "again", "--dtype=bf16") == 0
    assert convert(tmp_path / "run", tmp_path / "rounded", "--dtype=bf16") == 0
    assert same_files(tmp_path / "again", tmp_path / "rounded")


def test_a_run_of_adapters_is_read_as_the_merged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By programs that load a model and name the frozen one, by a file for llama.cpp, and by a run of two ranks that goes on
    from it."""
    folder = write_folder("llama", tmp_path / "model")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    export = run(folder, tmp_path / "adapter", tmp_path / "run", "--training_dtype=bf16")
    merged, cpu = export / "merged" / "1", torch.device("cpu")
    ours, theirs = (
        load_local(place, None, "bf16", cpu).layers for place in (tmp_path / "run", merged)
    )
    for one, other in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        assert torch.equal(one, other)
    assert tasks._folder(tmp_path / "run") == merged  # lm-eval reads it itself
    capsys.readouterr()
    load_local(export / "1", None, "fp32", cpu)
    assert f"model: {export}/1, adapters, merged into {folder}\n" in capsys.readouterr().err
    still = ("--optimizer=sgd", "--lr=0", "--weight_decay=0", "--zero_stage=3")
    once = ("--train_iters=1", "--export_interval=1", "--training_dtype=bf16")
    run_distributed(2, train, flags(tmp_path / "run", tmp_path / "next", *still, *once))
    assert same_files(tmp_path / "next" / "export" / "1", merged)
    for parts in ("model,optimizer", "model,step"):
        with pytest.raises(RuntimeError, match="adapters, whose optimizer state and iterations"):
            words = flags(tmp_path / "run", tmp_path / "third", *once, f"--load_parts={parts}")
            run_distributed(1, train, words)
    if importlib.util.find_spec("gguf"):
        assert convert(tmp_path / "run", tmp_path / "one", kind="gguf") == 0
        assert convert(merged, tmp_path / "other", kind="gguf") == 0
        files = [tmp_path / name / "model.gguf" for name in ("one", "other")]
        assert len({file.read_bytes() for file in files}) == 1


def test_a_later_merge_needs_the_model_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder("llama", tmp_path / "model")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    run(folder, tmp_path / "adapter", tmp_path / "run")
    other = write_folder("llama", tmp_path / "other")
    values = load_file(other / "model.safetensors")
    values["model.norm.weight"][3] += 1e-5
    save_file(values, other / "model.safetensors", {"format": "pt"})
    target = tmp_path / "merged"
    for wrong, code, problem in (
        (other, 4, "holds adapters to a model of digest .*other is another model; give that"),
        (write_folder("gpt2", tmp_path / "gpt2"), 4, "does not fit the model"),
        (tmp_path / "nowhere", 4, "to a model that is not here .*nowhere.* --base"),
    ):
        assert convert(tmp_path / "run", target, f"--base={wrong}") == code
        assert re.search(problem, capsys.readouterr().err)
    assert convert(tmp_path / "run", folder, "--exist_ok") == 2
    assert "must not contain each other" in capsys.readouterr().err
    assert convert(folder, target, f"--base={folder}") == 2
    assert "holds no adapters; leave it out" in capsys.readouterr().err
    adapter = tmp_path / "adapter"
    assert convert(adapter, target, f"--base={adapter}") == 4  # as if it named itself
    assert f"{adapter}: it holds an adapter" in capsys.readouterr().err
    assert convert(adapter, target, "--weights=average") == 4
    assert "has one set of adapters" in capsys.readouterr().err
    folder.rename(tmp_path / "moved")
    assert convert(tmp_path / "run", target) == 4
    assert "a model that is not here" in capsys.readouterr().err
    assert convert(tmp_path / "run", target, f"--base={tmp_path / 'moved'}") == 0
    assert same_files(target, tmp_path / "run" / "export" / "merged" / "1")


def test_adapters_whose_model_leads_back_to_them_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run took the name of its model."""
    folder = write_folder("llama", tmp_path / "model")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    run(folder, tmp_path / "adapter", tmp_path / "run")
    folder.rename(tmp_path / "moved")
    (tmp_path / "run").rename(folder)
    assert convert(folder, tmp_path / "merged") == 4
    assert "which leads back to them; convert_checkpoint" in capsys.readouterr().err
    assert convert(folder, tmp_path / "merged", f"--base={tmp_path / 'moved'}") == 0


def test_the_base_is_named_for_readers_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/corpus/test_hub.py has names on the hub."""
    monkeypatch.chdir(tmp_path)
    assert _base_of("a/model") == {
        "base_model_name_or_path": f"{tmp_path}/a/model",
        "revision": None,
    }
    assert _base_of(None) == {"base_model_name_or_path": None}


def changed_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in values.items() if value != "absent"}
    path.write_text(json.dumps(kept))


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def changed_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of q_proj in the first block, by their last names; None: remove."""
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    new = {f"{prefix}.{key.replace('__', '.')}": value for key, value in changes.items()}
    found = {key: value for key, value in (weights(folder) | new).items() if value is not None}
    save_file(found, folder / "adapter_model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "flags_", "problem"),
    [
        (partial(changed_config, lora_alpha="absent"), "", "lacks lora_alpha"),
        (partial(changed_config, peft_type="IA3"), "", "is not of LoRA"),
        (partial(changed_config, rank_pattern={"q_proj": 2}), "", "rank_pattern={'q_proj': 2}"),
        (partial(changed_config, use_dora=True), "", "use_dora=True"),
        (partial(changed_config, bias="all"), "", "bias='all'"),
        # peft takes the adapter's first values from the model whenever it loads one of these
        (partial(changed_config, init_lora_weights="pissa"), "", "init_lora_weights='pissa'"),
        (partial(changed_config, r=0), "", "r=0 and lora_alpha=5; write"),
        (partial(changed_config, r=3.0), "", "r=3.0 and lora_alpha=5; write"),
        (partial(changed_config, lora_alpha=None), "", "lora_alpha=None; write"),
        (partial(changed_config, lora_alpha=math.nan), "", "lora_alpha=nan; write"),
        (partial(changed_config, lora_alpha=10**400), "", "at most 1,048,576"),
        (partial(changed_config, r=10**12), "", "r=1000000000000 and lora_alpha=5; write"),
        (partial(changed_config, target_parameters=5), "", "target_parameters=5, which is not"),
        (without_config, "", "--pretrained_adapter=.*: there is no adapter_config.json; give"),
        (partial(changed_weights, lora_B__weight=None), "", "no base_model.*q_proj.lora_B.weight"),
        (partial(changed_weights, lora_magnitude=torch.ones(2)), "", "lora_magnitude is not used"),
        (
            partial(changed_weights, lora_B__weight=torch.full((2, 2), math.nan)),
            "",
            "q_proj.lora_B.weight is not finite",
        ),
        (
            partial(changed_weights, lora_A__weight=torch.ones(2, 30)),
            "",
            r"q_proj has \[2, 30\] and",
        ),
        (lambda folder: None, "--lora_alpha=7", "lora_alpha: 5 in the checkpoint, 7 now"),
        (lambda folder: None, "--lora_targets=query", "down_proj.lora_A.weight is not used"),
    ],
)
def test_folders_that_are_refused(change: Any, flags_: str, problem: str, tmp_path: Path) -> None:
    folder = write_folder("llama", tmp_path / "model")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    change(tmp_path / "adapter")
    words = [f"--pretrained_adapter={tmp_path / 'adapter'}", *flags_.split()]
    with pytest.raises((RuntimeError, CheckpointError), match=problem):
        config_of([*flags(folder, tmp_path / "x"), *words], 1)  # most are refused here
        run(folder, tmp_path / "adapter", tmp_path / "run", *flags_.split())


def test_targets_and_scaling_come_from_the_folder(tmp_path: Path) -> None:
    """Maps of all blocks share a pattern."""
    folder = write_folder("llama", tmp_path / "model")
    chosen = [f"model.layers.{i}.self_attn.{x}_proj" for i, x in ((0, "q"), (1, "q"), (1, "v"))]
    adapted(folder, target_modules=chosen, r=2).save_pretrained(tmp_path / "adapter")
    words = [f"--pretrained_adapter={tmp_path / 'adapter'}", *flags(folder, tmp_path / "x")]
    options = config_of(words, 1).adapters
    assert options.lora_targets == ("blocks.*.attention.query", "blocks.1.attention.value")
    assert (options.lora_rank, options.lora_alpha, options.lora_scaling) == (2, 5.0, "rank")
