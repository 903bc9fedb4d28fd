"""What our models are called by Hugging Face, both ways. Imports neither torch nor transformers."""

from megatron_lite.huggingface.architectures.read_config import model_values
from megatron_lite.huggingface.architectures.table import ARCHITECTURES, Biases, biases_of, check_exportable
from megatron_lite.huggingface.architectures.write_config import hugging_face_config

__all__ = ["ARCHITECTURES", "Biases", "biases_of", "check_exportable", "hugging_face_config", "model_values"]
