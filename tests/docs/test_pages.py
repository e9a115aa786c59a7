"""The pages of the documentation keep to their sizes, their links lead somewhere, and paths that they name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.paths import DOCS, ROOT
from tests.tools.drawings import DRAWINGS, FOLDER
from tests.tools.generated_docs import MEASUREMENTS, TABLES, block_names, fill, pages, without_blocks

LINE_LENGTH = 120
README_LINES = 110
ARCHITECTURE_WORDS = 1000
PAGES = pages()
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FOREIGN = re.compile(r"[a-z]+:")
HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)
PATH = re.compile(
    r"`((?:sluice|engine|serving|pipelines|gateway|cli|load|tests|docs|models|deploy|benchmarks|training)/[\w./-]*)`"
)

MADE_BY_OPERATORS = "deploy/secrets/"
PLACEHOLDER = "NAME"


def without_code(text: str) -> str:
    """Return a page without its blocks of code: fenced ones, and indented ones outside of lists."""
    lines = FENCE.sub("", text).splitlines()
    kept, in_list = [], False
    for line in lines:
        if line.strip():
            in_list = bool(re.match(r" *([-*]|\d+\.) ", line)) or (in_list and line.startswith(" "))
        if in_list or not line.startswith("    "):
            kept.append(line)
    return "\n".join(kept)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    return {_slug(title) for title in HEADING.findall(without_code(page.read_text()))}


def _slug(title: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.strip().lower()))


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links to files and headings of the project."""
    text = CODE.sub("`code`", without_code(page.read_text()))
    return (target for target in LINK.findall(text) if not FOREIGN.match(target))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_architecture_is_told_in_few_words_and_three_drawings() -> None:
    text = (DOCS / "architecture.md").read_text()
    assert len(text.split()) < ARCHITECTURE_WORDS
    assert len(re.findall(r"\.svg\)", text)) == 3


@EACH_PAGE
def test_lines_are_at_most_120_characters(page: Path) -> None:
    text = FENCE.sub("", without_blocks(page.read_text()))
    lines = [re.sub(r"\S*(?:https?://|\]\()\S*", "", line) for line in text.splitlines()]
    assert [line for line in lines if len(line) > LINE_LENGTH] == []


@EACH_PAGE
def test_links_and_anchors_resolve(page: Path) -> None:
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.is_file() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


@EACH_PAGE
def test_paths_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it tells of what is gone too
    named = PATH.findall(FENCE.sub("", page.read_text()))
    stated = [path for path in named if not path.startswith(MADE_BY_OPERATORS) and PLACEHOLDER not in path]
    assert [path for path in stated if not (ROOT / path).exists()] == []


def test_the_architectures_tree_exists() -> None:
    tree = (DOCS / "architecture.md").read_text().partition("```\n")[2].partition("```")[0]
    room, missing = Path(), []
    for line in tree.splitlines():
        for name in re.findall(r"(?<![\w/])[a-z_]+(?:/[a-z_]+)*(?:/|\.py\b)", line.partition("what ")[0]):
            if not line.startswith(" "):
                room = Path(name) if line.startswith(name) else room
                found = (ROOT / name).exists()
            else:
                found = (ROOT / room / name).exists()
            missing += [] if found else [f"{room}: {name}"]
    assert missing == []


@EACH_PAGE
def test_generated_tables_are_current(page: Path) -> None:
    text = page.read_text()
    contents = {name: TABLES[name]() for name in block_names(text) if name not in MEASUREMENTS}
    assert text == fill(text, contents), "run `make docs`"


def test_every_generated_part_has_one_place() -> None:
    places = [name for page in PAGES for name in block_names(page.read_text())]
    assert sorted(places) == sorted([*TABLES, *MEASUREMENTS])


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_current(name: str) -> None:
    assert (FOLDER / name).read_text() == DRAWINGS[name](), "run `python -m tests.tools.drawings`"


def test_every_drawing_is_shown() -> None:
    shown = {Path(target).name for page in PAGES for target in links(page) if target.endswith(".svg")}
    assert shown == set(DRAWINGS) == {path.name for path in FOLDER.iterdir()}


def test_the_site_has_every_page() -> None:
    """The tags of mkdocs.yml that name Python objects stay unread."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)  # type: ignore[attr-defined]
    configuration = yaml.load((ROOT / "mkdocs.yml").read_text(), loader)
    listed = set(_leaves(configuration["nav"]))
    assert {str(page.relative_to(ROOT)) for page in PAGES} <= listed
    assert all((ROOT / path).is_file() for path in listed)


def _leaves(node: object) -> Iterator[str]:
    match node:
        case str():
            yield node
        case list():
            for each in node:
                yield from _leaves(each)
        case dict():
            for each in node.values():
                yield from _leaves(each)
