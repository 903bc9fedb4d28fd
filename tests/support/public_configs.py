"""config.json of popular models, as published, and their sizes.

`PUBLIC` is preset -> (the text, parameters); `SIZES` is the same for one model of each family without
a preset, whose factors of longrope are left out. The files of different publishers and versions of
transformers name different keys that mean nothing to a model; those are there, too. `BIGCODE` has
the keys of the StarCoder family (multi-query attention, learned positions).
"""

import json
from pathlib import Path
from typing import Any

_VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "public_configs.json").read_text("utf-8")
)
PUBLIC, SIZES = (
    {
        name: (json.dumps(entry["config"]), int(entry["parameters"]))
        for name, entry in _VECTORS[kind].items()
    }
    for kind in ("presets", "sizes")
)
BIGCODE = json.dumps(_VECTORS["gpt_bigcode"])


def public_config(name: str) -> dict[str, Any]:
    """Return the content of one of `PUBLIC` or `SIZES`."""
    return json.loads((PUBLIC | SIZES)[name][0])
