"""What can be known of exports before anything is trained. Imports no torch."""

from __future__ import annotations

from megatron_lite.checkpoint.architectures import check_exportable
from megatron_lite.config import Config


def check_exports(config: Config) -> None:
    """Refuse a resolved configuration that asks for exports in a format that cannot express its model.

    Raises:
        UsageError: if no Hugging Face architecture can, saying what each would need.
    """
    if config.training.export_interval is not None and config.training.export_format == "huggingface":
        check_exportable(config.model, config.training.export_model_type)
