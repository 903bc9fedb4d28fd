"""What can be known of exports before anything is trained. Imports no torch."""

from __future__ import annotations

from megatron_lite.config import Config
from megatron_lite.huggingface.architectures import check_exportable


def check_exports(config: Config) -> None:
    """Refuse a resolved configuration that asks for exports in a format that cannot express its model.

    An --export_model_type is held against the model without exports, too: checkpoints keep it for a later conversion.

    Raises:
        UsageError: if no Hugging Face architecture can, or not the one that is asked for, saying what is needed.
    """
    training = config.training
    exports = training.export_interval is not None and training.export_format == "huggingface"
    if exports or training.export_model_type is not None:
        check_exportable(config.model, training.export_model_type)
