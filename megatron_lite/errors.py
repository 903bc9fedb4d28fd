"""Errors a user can cause or must act on, each with the exit code that scripts can rely on.

`exit.json` in the experiment directory repeats the code, because torchrun flattens every failure to 1.
"""


class RunError(ValueError):
    """An expected failure: printed as one clear message without a traceback."""

    exit_code = 1
    agreed = False  # whether every rank raises it together, so that rank 0 speaks for all


class UsageError(RunError):
    """A wrong flag or a contradiction between flags."""

    exit_code = 2
    agreed = True


class DataError(RunError):
    """Input data that is missing, damaged or does not fit the model."""

    exit_code = 3


class CheckpointError(RunError):
    """No usable checkpoint, or one that does not fit the command line."""

    exit_code = 4
    agreed = True


class NumericsError(RunError):
    """Training has diverged: every recent update was dropped."""

    exit_code = 5


class PeerError(RunError):
    """Another rank died or stopped answering."""

    exit_code = 6


class OutOfMemoryError(RunError):
    """The device or the host ran out of memory."""

    exit_code = 7


class StorageError(RunError):
    """A directory that cannot be written, or a full disk."""

    exit_code = 8
    agreed = True


EXIT_DONE = 0
EXIT_PREEMPTED = 75
