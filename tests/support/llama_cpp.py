"""llama.cpp itself, in a process of its own: it may end the process on a file that it has loaded.

As a program (python llama_cpp.py) it reads {"file", "prompts", "texts"} and prints the log
probabilities of all tokens after each prompt of ids, and the ids of each text.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def ask(file: Path, prompts: list[list[int]], texts: list[str] | None = None) -> dict[str, Any]:
    """Return `logprobs` (v,) after each prompt, one by one, and the `ids` of each text."""
    asked = {"file": str(file), "prompts": prompts, "texts": texts or []}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Load the file on one thread with an fp32 cache, and compute."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = asked["file"]
    options.n_ctx, options.n_parallel, options.n_gpu_layers = 64, 1, 0
    options.warmup = options.fit_params = options.cache_prompt = False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(options)
    return {
        "logprobs": [logprobs(server, prompt) for prompt in asked["prompts"]],
        "ids": [tokenize(server, text) for text in asked["texts"]],
    }


def logprobs(server: Any, prompt: list[int]) -> list[float]:
    words = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_prompt": False}
    choice = server.handle_completions(words | {"logprobs": 100_000})["choices"][0]
    found = choice["logprobs"]["content"][0]["top_logprobs"]
    by_id = {each["id"]: each["logprob"] for each in found}
    return [by_id[number] for number in range(len(by_id))]


def tokenize(server: Any, text: str) -> list[int]:
    content = json.dumps({"content": text, "add_special": True, "parse_special": True})
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        content.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        found: list[int] = json.load(response)["tokens"]
    return found


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
