"""Links between the documents lead somewhere, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gammaray.config import parse
from gammaray.drafter_config import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text())


def relative_links(page: Path) -> list[str]:
    return [link for link in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the headings of `page`."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The relative links of `page` whose file or heading does not exist."""
    found = []
    for link in relative_links(page):
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (fragment and target.suffix == ".md" and fragment not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One Heading\n[a](#one-heading) [b](#none) [c](none.md) `[d](code.md)` [e](https://x.org)\n"
    )
    assert broken(page) == ["#none", "none.md"]


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in relative_links(page)]
    assert set(PAGES) - seen == set()


def test_the_home_has_the_groups_of_the_menu() -> None:
    """In its order. Of the reference it has the first page."""
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"][1:]
    pages = {
        name: [own if isinstance(own, str) else next(iter(own.values())) for own in listed]
        for group in menu
        for name, listed in group.items()
    }
    home = re.split(r"^## (.+)$", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)[1:]
    linked = {name: LINK.findall(text) for name, text in zip(home[::2], home[1::2], strict=True)}
    assert linked["Reference"] == pages["Reference"][:1]
    assert list(linked) == [*pages, "Decisions", "Words"]
    for name in pages.keys() - {"Reference"}:
        assert [link.removeprefix("../") for link in linked[name]] == pages[name]


def test_every_drafter_and_each_of_its_keys_is_documented() -> None:
    """As settings that are accepted, which name every key, and in a table of what the keys mean."""
    page = (ROOT / "docs" / "drafters.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    settings = {"target": {"model": "x"}} | yaml.safe_load(block)
    shown = parse(settings, "docs/drafters.md").drafters.values()
    assert {own.method for own in shown} == set(METHODS)
    keys = {own.method: {name for name in type(own).model_fields if name != "version"} for own in shown}
    assert {own.method: set(own.model_fields_set) for own in shown} == keys
    rows = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    assert [key for own in shown for key in type(own).model_fields if f"`{key}`" not in rows] == [
        "method"
    ] * 12
    assert all(f"| `{method}`" in page for method in METHODS)


def test_decisions_are_short_and_have_their_parts() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        text = page.read_text()
        missing = [
            part for part in ("Summary", "Motivation", "Decision", "Consequences") if f"## {part}" not in text
        ]
        assert (missing, len(text.splitlines()) < 40) == ([], True), page.name
