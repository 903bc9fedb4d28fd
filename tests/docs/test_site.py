"""The documents: every link leads somewhere, here and in the site that mkdocs builds of them."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from scripts.docs import links

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
PAGE = """# A page
See [this](#a-page), [that `code`](other.md#the-2nd-page-s-title), ![picture](a%20b.png "title"), <https://example.org/x>.
`[not](a-link.md)`

```text
[nor](this.md)
# not a heading
```
"""


def test_links_lead_somewhere() -> None:
    """Files and headings exist; web addresses have their form."""
    assert not [problem for document in DOCUMENTS for problem in links.problems(document, ROOT)]


def test_paths_in_documents_exist() -> None:
    """A path into the tree in a line of code, and a module after `python -m`, is there."""
    # by a script; parts of addresses
    written = ("docs/gpu_report.json", "docs/stable/notes", "docs/main/")
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        paths = set(
            re.findall(
                r"\b(?:scripts|tests|megatron_lite|docs)/[\w./]*\w", links.FENCE.sub("", text)
            )
        )
        assert not [
            path for path in paths if not path.startswith(written) and not (ROOT / path).exists()
        ], document
        for name in re.findall(r"python3? -m ((?:scripts|tests)[.\w]*\w)", text):
            path = ROOT / name.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (
                document,
                name,
            )


def test_inner_lists_are_indented_by_four_spaces() -> None:
    """GitHub takes two as well, but the site would show one flat list."""
    for path in DOCUMENTS:
        prose = links.FENCE.sub("", path.read_text("utf-8"))
        assert not re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", prose, re.M), path.name


def test_links_are_found() -> None:
    """Links, pictures and addresses count; code does not. Most documents link to others."""
    expected = ["#a-page", "other.md#the-2nd-page-s-title", "a%20b.png", "https://example.org/x"]
    assert links.targets(PAGE) == expected
    assert links.targets('<img src="a.png">\n[word]: b.md\n[![x](c.svg)](https://d.org)') == [
        *("c.svg", "https://d.org", "a.png", "b.md")
    ]
    assert sum(len(links.targets(path.read_text("utf-8"))) for path in DOCUMENTS) > 80


DEAD = {
    "no such file": ["absent.md", "../../outside.md", "/docs/page.md"],
    "no such heading": ["page.md#absent", "#not-a-heading", "picture.png#a-page"],
    "write https://": ["http://example.org", "https://localhost/x", "https://example.org/x."],
}
LIVE = ["page.md#a-page", "#twice-1", "../docs", "https://example.org/x#y(z)"]


def test_dead_links_are_named(tmp_path: Path) -> None:
    """A link to a missing file or heading, or out of the checkout, is one line with the document
    and the target."""
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    (page.parent / "picture.png").touch()
    for target, problem in [(target, name) for name in DEAD for target in DEAD[name]] + [
        (one, "") for one in LIVE
    ]:
        page.write_text(
            f"# A page\n## Twice\n## Twice\n```\n# Not a heading\n```\n[x](<{target}>)\n"
        )
        found = list(links.problems(page, tmp_path))
        assert len(found) == bool(problem), target
        assert all(problem in line and repr(target) in line for line in found), target


def test_anchors_are_those_of_github() -> None:
    """Punctuation goes, each space becomes a dash, underscores and letters of other languages
    stay."""
    anchors = {
        "Two ranks, of one thread": "two-ranks-of-one-thread",
        "`--zero_stage=auto` & friends": "--zero_stageauto--friends",
        "A *word* and a [link](x.md)": "a-word-and-a-link",
        "Größe 2": "größe-2",
    }
    assert {heading: links.slug(heading) for heading in anchors} == anchors


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.guides
def test_site_has_all_pages(site: Path) -> None:
    """Each document is a page, README the first; no other server is needed; the search knows all of
    them."""
    names = {"index" if path.stem == "README" else path.stem for path in DOCUMENTS}
    assert names <= {path.stem for path in site.glob("*.html")}
    for name in names:
        loaded = re.findall(
            r"<(?:script|img|link rel=.stylesheet)[^>]+(?:src|href)=.(https?:)",
            (site / f"{name}.html").read_text(),
        )
        assert not loaded, name
    found = {
        entry["location"].split("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert found == {f"{name}.html" for name in names}


@pytest.mark.guides
def test_links_of_the_site_are_those_of_the_documents(site: Path) -> None:
    """From the README a link leads to a page and its heading; a file without a page is named
    without a link."""
    home = (site / "index.html").read_text("utf-8")
    assert 'href="runs.html#stopping"' in home or 'href="runs.html"' in home
    assert (
        'href="CONTRIBUTING.html"' in home
        and 'href="LICENSE"' in home
        and (site / "LICENSE").is_file()
    )
    assert "scripts/examples" in home and 'scripts/examples"' not in home
    for page in site.glob("*.html"):
        text = page.read_text("utf-8")
        for target, anchor in re.findall(r'href="([\w]+\.html)#([^"]+)"', text):
            assert f'id="{anchor}"' in (site / target).read_text("utf-8"), (
                f"{page.name} links to {target}#{anchor}"
            )


@pytest.mark.guides
def test_search_finds_a_word_in_a_browser(site: Path) -> None:
    """In a real browser, a word typed into the search finds the page about it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    (site / "search_for.html").write_text(SEARCH)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SiteHandler, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/search_for.html"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", address]
        page = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        server.shutdown()
    assert "schedules.html?h=warmup" in page


# The browser prints a page as soon as it has loaded. The picture comes late, when the search has
# answered.
SEARCH = """<iframe src="index.html?q=warmup"></iframe><img src="late.png"><pre></pre>
<script>
onload = () => {
  const found = document.querySelector("iframe").contentDocument.querySelectorAll(".md-search-result__link")
  document.querySelector("pre").textContent = [...found].map(link => link.href).join(" ")
}
</script>
"""


class SiteHandler(http.server.SimpleHTTPRequestHandler):
    """A silent server of files, which takes its time for late.png."""

    def do_GET(self) -> None:
        if self.path == "/late.png":
            time.sleep(5)
        super().do_GET()

    def log_message(self, *_: object) -> None: ...
