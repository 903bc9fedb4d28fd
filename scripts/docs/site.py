"""mkdocs hooks for the documentation site, named in mkdocs.yml.

The documents are written for GitHub. The hooks add those outside docs/, and make links and anchors
lead to the same places as on GitHub. A link to a file that has no page becomes plain text.
"""

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs imports this file by its path

from scripts.docs.links import slug
from scripts.docs.tables import ROOT

OUTSIDE = {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")} | {
    "README.md": "index.md"
}
_FENCES = re.compile(r"(^[ >]*```.*?^[ >]*```[^\n]*$)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the same anchors as GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda heading, separator: slug(heading)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside of docs/."""
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for the site."""
    names = {place: name for name, place in OUTSIDE.items()}
    source = names.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCES.split(markdown)  # code blocks have odd numbers
    parts[::2] = [_LINK.sub(lambda link: _rewritten(link, source), part) for part in parts[::2]]
    return "".join(parts)


def _rewritten(link: re.Match[str], source: str) -> str:
    mark, text, path, anchor = link.groups("")
    target = os.path.normpath(os.path.join(os.path.dirname(source), path))
    place = OUTSIDE.get(
        target, target.removeprefix("docs/") if target.startswith("docs/") else None
    )
    if place is None:
        return text
    if source.startswith("docs/"):
        place = os.path.relpath(place, os.path.dirname(source.removeprefix("docs/")))
    return f"{mark}[{text}]({place}{anchor})"
