"""A command-line pretrainer for language models: flat flags, a ZeRO 1/2/3 partitioner, a plain
training loop."""

__version__ = "0.1.0"
