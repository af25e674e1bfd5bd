"""The documentation's site is whole: it builds strictly, fetches nothing, and shows the code's own words."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
LETTER, SMALL = 6.8, 6.0  # pixels of a letter of a wide font


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds. A warning ends it: a link or an anchor without a target, a page in no menu."""
    folder = tmp_path_factory.mktemp("site")
    said = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    typed = next(line for line in said.splitlines() if "mkdocs" in line)
    words = [word for word in shlex.split(typed) if "=" not in word]
    assert "--strict" in words and not {"-q", "--quiet"} & set(words)  # quiet, mkdocs counts no warnings
    command = [sys.executable, *words[1:], "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser would fetch for a page, and the links that it only offers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.found += [value for name in ("src", "srcset") if (value := own.get(name))]
        if tag == "link" and own.get("rel") != "canonical" and (href := own.get("href")):
            self.found.append(href)
        if "mermaid" in (own.get("class") or ""):  # the theme would load what draws it
            self.found.append("https://unpkg.com")


def foreign(folder: Path) -> Iterator[str]:
    for page in folder.rglob("*.html"):
        yield from (url for url in Fetched(page.read_text()).found if re.match(r"(https?:)?//", url))
    for sheet in folder.rglob("*.css"):
        yield from re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text())


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    assert list(foreign(site)) == []


def test_what_a_page_fetches_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://a.org">a</a><script src="//b.org/b.js"></script><img src="c.svg">'
        '<link rel="stylesheet" href="https://d.org/d.css"><pre class="mermaid"></pre>'
    )
    (tmp_path / "a.css").write_text("@import 'https://e.org/e.css'; a {background: url(https://f.org/f.png)}")
    hosts = [url.split("/")[2] for url in foreign(tmp_path)]
    assert hosts == ["b.org", "d.org", "unpkg.com", "e.org", "f.org"]


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_each_module(site: Path, module: str) -> None:
    pages = [page.read_text() for page in (site / "reference").rglob("index.html")]
    assert any(f'id="{module}"' in page for page in pages)


def test_the_reference_says_what_docstrings_and_comments_say(site: Path) -> None:
    """Of a field the comment behind it; nothing that is private."""
    page = (site / "reference" / "types" / "index.html").read_text()
    field = page.split('id="gammaray.types.SamplingParams.top_k"')[1].split("<h4")[0]
    assert "0: off" in field and "Mean tokens emitted per round" in page
    assert "gammaray.types._sum" not in page


def test_pages_outside_of_docs_join_it(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert 'href="CONTRIBUTING/"' in text and (site / "CONTRIBUTING" / "index.html").exists()
    assert 'href="../benchmarks/results/predictor/"' in (site / "routing" / "index.html").read_text()


def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / ".ci" / "site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("uri", "written", "shown"),
    [
        ("a.md", "[b](b.md#c) [d](https://d.org) [e](#e)", "[b](b.md#c) [d](https://d.org) [e](#e)"),
        ("a.md", "[it](../CONTRIBUTING.md#tests)", "[it](CONTRIBUTING.md#tests)"),
        ("decisions/a.md", "[it](../../CONTRIBUTING.md)", "[it](../CONTRIBUTING.md)"),
        ("CONTRIBUTING.md", "[b](docs/b.md)", "[b](b.md)"),
        ("a.md", "see [`engine/`](../engine)", "see `engine/`"),
        ("a.md", "`[x](../engine)`\n```\n[x](../engine)\n```", "`[x](../engine)`\n```\n[x](../engine)\n```"),
        ("a.md", "[typo](../engines)", "[typo](../engines)"),  # for mkdocs to find
    ],
)
def test_links_of_the_repository_become_links_of_the_site(uri: str, written: str, shown: str) -> None:
    assert hook().rewritten(written, uri, {"a.md", "b.md", "CONTRIBUTING.md"}) == shown


def small_site(folder: Path, page: str, pages: list[str]) -> None:
    """Builds one with the settings of mkdocs.yml and `pages` in its menu. `page`: what its index says."""
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(page)
    (docs / "other.md").write_text("# Other")
    own = {"docs_dir": str(docs), "site_dir": str(folder / "site"), "nav": pages, "plugins": [], "hooks": []}
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, **own))


@pytest.mark.parametrize("page", ["[a](none.md)", "[a](other.md#none)", "[a](/other)", "[a](../engine)"])
def test_a_broken_link_ends_the_build(tmp_path: Path, page: str) -> None:
    """mkdocs itself only mentions most of these."""
    with pytest.raises(Abort):
        small_site(tmp_path, page, ["index.md", "other.md"])


def test_a_page_that_is_in_no_menu_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(Abort):
        small_site(tmp_path, "[a](other.md#other)", ["index.md"])


def test_a_whole_site_is_built(tmp_path: Path) -> None:
    small_site(tmp_path, "[a](other.md#other)", ["index.md", "other.md"])
    assert (tmp_path / "site" / "other" / "index.html").exists()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_can_be_read_by_everyone(picture: Path) -> None:
    """In light and dark, by screen readers, without a text that the edge cuts off."""
    root = ElementTree.parse(picture).getroot()
    assert all(root.findtext(f"{SVG}{name}") for name in ("title", "desc"))
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    assert not re.search(r"(href|@import|<script|<image|https?:)", picture.read_text().replace(SVG[1:-1], ""))
    width = float(root.attrib["viewBox"].split()[2])
    assert [text.text for text in root.iter(f"{SVG}text") if not inside(text, width)] == []


def inside(text: ElementTree.Element, width: float) -> bool:
    kind = text.get("class", "")
    long = len(text.text or "") * (SMALL if "small" in kind else LETTER)
    anchor = text.get("text-anchor", "middle" if "middle" in kind else "start")
    left = float(text.attrib["x"]) - long * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    return left >= 0 and left + long <= width


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert [picture.name for picture in PICTURES if f"](pictures/{picture.name})" not in pages] == []
