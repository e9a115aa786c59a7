"""Markdown, read as its source.

The text of a document is the Markdown itself, less what a reader of the rendered page does not see: front matter,
comments, HTML tags, where links point and definitions of references. Language models read Markdown well, and code
blocks, lists and tables keep their form, while addresses would fill chunks with tokens that no question asks for.
Where a document has none of that, offsets are those of the user's own file (with lines ended by "\\n").
"""

import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pipelines.rag.documents import markdown_inline
from pipelines.rag.documents.edits import Edit, Edits
from pipelines.rag.documents.encoding import decoded
from pipelines.rag.documents.extract import Extract, as_label

_BLOCKS = MarkdownIt("commonmark").enable("table").disable("inline")
"""Finds blocks alone: what is inside of them stays source, and takes Python's parser most of its time."""
_INLINE = MarkdownIt("commonmark")
_FRONT_MATTER = re.compile(r"(---|\+\+\+)[^\S\n]*\n(.*?\n)?\1[^\S\n]*(?:\n|\Z)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title[^\S\n]*[:=][^\S\n]*(.+?)[^\S\n]*$", re.MULTILINE | re.IGNORECASE)
_MARKED_UP = re.compile(r"[\\`*_\[\]<>&!]")
_STARTS = frozenset(
    {"paragraph_open", "list_item_open", "fence", "code_block", "tr_open", "heading_open", "html_block"}
)
_PROSE = frozenset({"paragraph_open", "tr_open", "heading_open"})


def read(content: bytes) -> Extract:
    """The title is the front matter's, else the first heading of level 1."""
    source = decoded(content)
    front = _FRONT_MATTER.match(source)
    source = source[front.end() :] if front else source
    env: dict[str, Any] = {}
    tokens = _BLOCKS.parse(source, env)
    lines = list(accumulate((len(line) + 1 for line in source.split("\n")), initial=0))
    edits = Edits(source, sorted(_edits(source, tokens, lines, env)))
    headings = [(edits.moved(start), level, text) for start, level, text in _headings(tokens, lines)]
    starts = {edits.moved(lines[token.map[0]]) for token in tokens if token.map and token.type in _STARTS}
    title = _front_title(front) or next((text for _, level, text in headings if level == 1), "")
    return Extract(edits.text, title, headings, sorted(starts - {0, len(edits.text)}))


def _edits(source: str, tokens: list[Token], lines: list[int], env: dict[str, Any]) -> Iterator[Edit]:
    """What is to stand instead of the blocks that have something unseen in them, by their place in the source."""
    references = env.get("references", {})
    for definition in (*references.values(), *env.get("duplicate_refs", ())):
        start, end = _span(definition["map"], lines, source)
        yield Edit(start, end, "")
    for token in tokens:
        if token.map is None or token.type not in _PROSE | {"html_block"}:
            continue
        start, end = _span(token.map, lines, source)
        block = source[start:end]
        clean = markdown_inline.html(block) if token.type == "html_block" else markdown_inline.prose(block, references)
        if clean != block:
            yield Edit(start, end, clean)


def _span(lines_of_block: list[int], lines: list[int], source: str) -> tuple[int, int]:
    first, after = lines_of_block
    return lines[first], min(lines[after], len(source))


def _headings(tokens: list[Token], lines: list[int]) -> Iterator[tuple[int, int, str]]:
    for token, inside in pairwise(tokens):
        if token.type == "heading_open" and token.map is not None:
            text = as_label(_rendered(inside.content))
            if text:
                yield lines[token.map[0]], int(token.tag[1]), text


def _rendered(content: str) -> str:
    """A heading's source without its markup."""
    if not _MARKED_UP.search(content):
        return content
    (inline,) = _INLINE.parseInline(content)
    return "".join(" " if child.type == "softbreak" else _shown(child) for child in inline.children or ())


def _shown(child: Token) -> str:
    return "" if child.type == "html_inline" else child.content


def _front_title(front: re.Match[str] | None) -> str:
    found = _FRONT_TITLE.search(front.group(2) or "") if front else None
    return as_label(found.group(1).strip("\"'")) if found else ""
