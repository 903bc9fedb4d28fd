"""What docs/exports.md says to users of other programs."""

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_lite.config import ModelConfig
from megatron_lite.errors import UsageError
from megatron_lite.huggingface.architectures import ARCHITECTURES
from megatron_lite.huggingface.gguf_file import family_of
from tests.support import documents

pytestmark = pytest.mark.guides


def test_script_pushes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as written, with a client that checks its arguments by huggingface_hub's own signatures."""
    hub = pytest.importorskip("huggingface_hub")
    blocks = documents.blocks(documents.read("exports"), "python")
    script = tmp_path / "push.py"
    script.write_text(next(block for block in blocks if "HfApi" in block))
    client = mock.create_autospec(hub.HfApi)
    monkeypatch.setattr(hub, "HfApi", client)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "export" / "1000")])
    monkeypatch.setenv("HUB_REPOSITORY", "me/mine")
    runpy.run_path(str(script), run_name="__main__")
    api = client.return_value
    api.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    folder = tmp_path / "export" / "1000"
    api.upload_folder.assert_called_once_with(
        repo_id="me/mine", folder_path=folder, commit_message="Iteration 1000"
    )


def test_lists_the_families_of_llama_cpp() -> None:
    with pytest.raises(UsageError) as error:
        family_of("gpt_oss", ModelConfig())
    known = re.search("none of (.*?);", str(error.value))
    listed = re.search(r"Families: (.*?)\.\s", documents.read("exports"), re.S)
    assert known and listed
    families = known[1].split(", ")
    assert re.findall(r"\w+", listed[1].replace(" and ", " ")) == families
    assert {*families} < {*ARCHITECTURES}
