"""Text and structure read from Markdown."""

import re

import pytest

from sluice.pipelines.rag.documents import markdown
from sluice.pipelines.rag.documents.extract import MAX_HEADING_CHARS, Extract


def read(source: str) -> Extract:
    return markdown.read_markdown(source.encode())


def at(extract: Extract, places: list[int]) -> list[str]:
    return [extract.text[place:].partition("\n")[0] for place in places]


PLAIN = """\
# Guide

Intro with `code`, **bold** and <model>.

## Setup ##

1. first
2. second
   - nested

```python
# not a heading
[not](a link) <!-- no comment -->
```

| a | b |
|---|---|
| 1 | 2 |

Under
-----

    indented [code](x)
"""


def test_what_has_nothing_unseen_stays_to_the_last_character() -> None:
    assert read(PLAIN).text == PLAIN


def test_headings_of_all_kinds_are_found_where_they_are() -> None:
    extract = read(PLAIN)
    assert [(level, text) for _, level, text in extract.headings] == [(1, "Guide"), (2, "Setup"), (2, "Under")]
    assert at(extract, [start for start, _, _ in extract.headings]) == ["# Guide", "## Setup ##", "Under"]


def test_breaks_are_at_paragraphs_items_code_and_rows() -> None:
    assert at(read(PLAIN), read(PLAIN).breaks) == [
        "Intro with `code`, **bold** and <model>.",
        "## Setup ##",
        "1. first",
        "2. second",
        "   - nested",
        "```python",
        "| a | b |",
        "| 1 | 2 |",
        "Under",
        "    indented [code](x)",
    ]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('See [the docs](https://a.example/b_(c).md "T").', "See the docs."),
        ("[![badge](http://i.example/x.svg)](http://l.example) end", "badge end"),
        ("![a picture](data:image/png;base64,AAAA)", "a picture"),
        ("[ref][One], [one][], [other][two]\n\n[one]: http://a.example\n", "ref, one, [other][two]\n\n"),
        ("keep `[code](x)` and ``a ` [b](c)``", "keep `[code](x)` and ``a ` [b](c)``"),
        ("keep \\[this](x) and <https://a.example>", "keep \\[this](x) and <https://a.example>"),
        ("a <!-- gone --> b", "a  b"),
        ("<!-- gone\n\nall of it -->\n\nstays", "\n\nstays"),
        ("<div align=center>\n<b>Name</b>\n</div>\n\ntext<br>more", "\nName\n\n\ntextmore"),
        ("<script>\nlet x = 1\n</script>\n\ntext", "\n\ntext"),
        ("- [a](b)\n- c\n\n> [quoted](x)\n> on", "- a\n- c\n\n> quoted\n> on"),
        ("| [a](b) | c |\n|---|---|\n| [d](e) | f |", "| a | c |\n|---|---|\n| d | f |"),
    ],
)
def test_what_the_rendered_page_does_not_show_is_left_out(source: str, text: str) -> None:
    assert read(source).text == text


def test_places_are_right_behind_what_is_left_out() -> None:
    extract = read("[long link text](http://a.example)\n\n# [Title](x) of *it*\n\n<!-- c -->\n\nlast\n")
    assert extract.headings == [(16, 1, "Title of it")]
    assert at(extract, extract.breaks) == ["# Title of *it*", "", "last"]


@pytest.mark.parametrize(
    ("front", "title"),
    [
        ('---\ntitle: "The front: matter"\ntags: [a]\n---\n', "The front: matter"),
        ("+++\ntitle = 'TOML'\n+++\n", "TOML"),
        ("---\ntags: [a]\n---\n", "First"),
        ("---\n---\n", "First"),
        ("", "First"),
    ],
)
def test_the_title_is_the_front_matters_or_the_first_of_level_1(front: str, title: str) -> None:
    extract = read(f"{front}## Before\n\n# First\n\n# Second\n")
    assert extract.title == title
    assert extract.text.startswith("## Before")


def test_a_rule_at_the_start_is_no_front_matter() -> None:
    assert read("---\n\ntext\n").text == "---\n\ntext\n"


def test_line_ends_and_byte_order_marks_go() -> None:
    assert markdown.read_markdown(b"\xef\xbb\xbf# A\r\n\r\nb\r\n").text == "# A\n\nb\n"


def test_a_long_heading_is_cut() -> None:
    ((_, _, text),) = read("# " + "word " * 1000).headings
    assert len(text) <= MAX_HEADING_CHARS
    assert text.endswith("…")


@pytest.mark.parametrize(
    "piece",
    [
        "x <!--",
        "[",
        "[a",
        "[](a",
        "[]((",
        "x <a ",
        '[](a "',
        "\\[",
        "[a][b",
        "`a ``b ",
        "<!a ",
        "- ",
        "> ",
        "|a",
        "<div>\n",
    ],
)
def test_time_is_linear_in_what_is_never_closed(piece: str) -> None:
    """A quadratic parser takes many minutes for a document as long as this."""
    read(piece * ((256 << 10) // len(piece)))


def test_breaks_and_headings_are_in_order() -> None:
    extract = read(PLAIN * 3)
    assert list(extract.breaks) == sorted(set(extract.breaks))
    starts = [start for start, _, _ in extract.headings]
    assert starts == sorted(starts)
    assert len(re.findall("Guide", extract.text)) == 3
