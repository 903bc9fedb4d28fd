"""`python -m megatron_lite <verb>`: the command `megatron_lite`."""

import sys

from megatron_lite.commands import command

if __name__ == "__main__":
    sys.exit(command())
