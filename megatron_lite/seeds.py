"""Seeds as pure functions of names and numbers: no random state is stored or restored."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from names and numbers, equal on every machine, rank and Python
    version."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def dropout_seed(seed: int, iteration: int, micro_batch: int, rank: int) -> int:
    """Return the seed for the dropout masks of one micro-batch on a rank."""
    return derive_seed(seed, "dropout", iteration, micro_batch, rank)
