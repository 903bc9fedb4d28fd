"""Programs of strangers: a limit of time, memory and text ends them with a reason, and the next
call works."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.corpus import conversations
from megatron_lite.corpus.confined import Limits, confined
from megatron_lite.corpus.conversations import ChatTemplate
from megatron_lite.distributed.processes import has_ended
from megatron_lite.errors import DataError
from tests.corpus.test_conversations import assistant, prepare, said, user, write_lines

TINY = Limits(seconds=0.3, memory_bytes=2**26, answer_bytes=10_000)
SUBJECT = "the chat template (--chat_template)"
LOOPS = (
    "{% for i in range(3000) %}{% for j in range(3000) %}{% set x = j %}{% endfor %}{% endfor %}"
)
TALK = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_results_and_errors() -> None:
    """As JSON holds them; calls share a process, which is another one than this."""
    assert (
        confined(TINY, divmod, 7, 2) == [3, 1]
        and confined(TINY, str, "größe \ud800") == "größe \ud800"
    )
    assert confined(TINY, os.getpid) == confined(TINY, os.getpid) != os.getpid()
    with pytest.raises(
        DataError, match=rf"^{re.escape(SUBJECT)} refuses it: invalid literal for int"
    ):
        confined(TINY, int, "x")
    with pytest.raises(DataError, match=r"refuses it: .{,1000}$"):
        confined(TINY, int, "x" * 9000)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            (sum, range(10**9)),
            "takes more than 0.3 s",
        ),  # one call of C, which never looks at signals
        ((list, range(2**25)), f"needs more than {2**26:,} bytes of memory"),
        ((bytearray, 2**28), f"needs more than {2**26:,} bytes of memory"),
        ((str.ljust, "x", 10_000), "writes more than 10,000 bytes"),
        ((os._exit, 3), "ended its process"),
    ],
)
def test_a_limit_ends_a_call_and_not_the_next(call: tuple[Any, ...], reason: str) -> None:
    """One line with the reason; the process, or a new one, answers what follows."""
    with pytest.raises(DataError) as ended:
        confined(TINY, *call)
    assert str(ended.value) == f"{SUBJECT} {reason}"
    assert confined(TINY, divmod, 7, 2) == [3, 1]


def test_many_short_calls_have_a_limit_each() -> None:
    """The limit is one call's, not that of all calls."""
    begun = confined(TINY, time.process_time)
    while confined(TINY, time.process_time) < begun + 2 * TINY.seconds:
        confined(TINY, sum, range(10**6))


def test_prepare_data_skips_what_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation beyond a limit is skipped and named; those around it have the tokens of a run
    without it."""
    monkeypatch.setattr(conversations, "LIMITS", TINY)
    template = tmp_path / "some.jinja"
    template.write_text(
        f"{{% if messages[0].content == 'slow' %}}{LOOPS}{{% elif messages[0].content == 'long' %}}"
        f"{{{{ 'x' * 20000 }}}}{{% endif %}}{TALK}"
    )
    records = [
        {"messages": [user(text), assistant(f"b {text}")]}
        for text in ("a", "slow", "c", "long", "d")
    ]
    prepare(
        write_lines(tmp_path / "chats.jsonl", records),
        tmp_path / "x",
        f"--chat_template={template}",
    )
    printed = [
        line for line in capsys.readouterr().err.splitlines() if "not a conversation" in line
    ]
    for line, number, reason in zip(
        printed, (2, 4), ("takes more than 0.3 s", "writes more than 10,000"), strict=False
    ):
        assert f"chats.jsonl: line {number}: not a conversation: {SUBJECT} {reason}" in line
    assert said(tmp_path / "x") == ["b a\n", "b c\n", "b d\n"]
    source = write_lines(tmp_path / "chats.jsonl", records)
    prepare(source, tmp_path / "y", f"--chat_template={template}", "--strict", code=3)
    assert "line 2: not a conversation: " in capsys.readouterr().err


def test_a_template_that_is_always_slow_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By prepare_data with exit code 3 before it reads anything; a chat renders by the same
    limits."""
    monkeypatch.setattr(conversations, "LIMITS", TINY)
    (tmp_path / "slow.jinja").write_text(LOOPS + TALK)
    source = write_lines(tmp_path / "chats.jsonl", [{"messages": [user("a"), assistant("b")]}])
    prepare(source, tmp_path / "x", f"--chat_template={tmp_path / 'slow.jinja'}", code=3)
    assert capsys.readouterr().err == f"ERROR: {SUBJECT} takes more than 0.3 s\n"
    with pytest.raises(DataError, match="takes more than 0.3 s"):
        ChatTemplate(LOOPS, {}).render([user("a")], None, True)
    assert ChatTemplate(TALK, {}).render([user("a")], None, True) == "user: a\nassistant: "


def test_no_orphan_stays() -> None:
    """The process ends with its parent, waiting or busy, even if the parent is killed."""
    for call in ("int", "sum, range(10**10)"):
        code = "from megatron_lite.corpus.confined import Limits, confined; import os\n"
        code += f"print(confined(Limits(60), os.getpid), flush=True); confined(Limits(60), {call}); input()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            time.sleep(0.5)
            assert not has_ended(child)
            parent.kill()
        deadline_s = time.monotonic() + 60  # far more than the kernel's 5 s
        while not has_ended(child) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert has_ended(child)


def test_a_parent_that_ignores_sigterm_ends() -> None:
    """At its end it sends the process that signal and waits. A launcher may have it ignored."""
    code = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from megatron_lite.corpus.confined import Limits, confined\n"
        "if __name__ == '__main__': print(confined(Limits(), divmod, 7, 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[3, 1]\n"
