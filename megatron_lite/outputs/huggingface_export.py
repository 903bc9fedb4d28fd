"""Exports of a run in the format of Hugging Face, which only a run that is set up imports."""

from __future__ import annotations

from pathlib import Path

from megatron_lite.checkpoint.saved_state import training_facts
from megatron_lite.config import Config, JsonObject
from megatron_lite.corpus.remote_copy import hub_name
from megatron_lite.huggingface import adapter_folder
from megatron_lite.huggingface.adapter_folder import merged_weights
from megatron_lite.huggingface.export import export_weights, save_huggingface
from megatron_lite.huggingface.model_card import TrainingSummary
from megatron_lite.outputs.run import Run


def write_export(run: Run, folder: Path, config: Config) -> None:
    """Write a folder for transformers, or for peft; all ranks call this together. config: of the run, with the
    weights to export.

    Raises:
        NumericsError: on every rank, if a weight is not finite in the dtype of the export.
    """
    if config.adapters.lora_rank:
        base = _base_of(config.source.pretrained_checkpoint_path)
        adapter_folder.save(folder, run.model, config, base, run.distributed, run.experiment.check)
        if not config.adapters.export_merged:
            return
        folder = folder.parent / "merged" / folder.name
    length = config.batch.sequence_length
    trained = TrainingSummary(
        run.iteration,
        run.evaluated.get(run.iteration, {}),
        run.data.counts.state(run.iteration),
        training_facts(length, run.data.identity) if run.iteration else {},
        run.resumed.origin,
        run.comparison is not None,
    )
    weights_of = merged_weights if config.adapters.lora_rank else export_weights
    weights = weights_of(run.model, config, run.distributed)
    save_huggingface(
        folder, run.model, config, run.distributed, weights, run.experiment.check, trained
    )


def _base_of(folder: str | None) -> JsonObject:
    """Return what `adapter_config.json` says about the frozen model: its name on the hub, or a path
    that holds in any working directory."""
    if folder is None:
        return {"base_model_name_or_path": None}
    name, commit = hub_name(Path(folder)) or (str(Path(folder).absolute()), None)
    return {"base_model_name_or_path": name, "revision": commit}
