"""`python -m megatron_lite <verb>`: the command `megatron_lite`."""

from megatron_lite.commands import command

if __name__ == "__main__":
    raise SystemExit(command())
