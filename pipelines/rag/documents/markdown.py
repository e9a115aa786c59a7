"""Reads Markdown as its source.

A document's text is the Markdown itself, without what the rendered page does not show: front matter, comments, HTML
tags, link targets and reference definitions. Language models read Markdown well, and code blocks, lists and tables keep
their form, while addresses would fill chunks with tokens that no question asks for. In a document that has none of
these, offsets are those of the user's own file (with lines ended by "\\n").
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

from sluice.pipelines.rag.documents.extract import UTF_8, Extract, decode_text, format_label

_BLOCKS = MarkdownIt("commonmark").enable("table").disable("inline")
"""Finds blocks only: inline content stays source, and parsing it would take this parser most of its time."""
_INLINE = MarkdownIt("commonmark")
_FRONT_MATTER = re.compile(r"(---|\+\+\+)[^\S\n]*\n(.*?\n)?\1[^\S\n]*(?:\n|\Z)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title[^\S\n]*[:=][^\S\n]*(.+?)[^\S\n]*$", re.MULTILINE | re.IGNORECASE)
_MARKED_UP = re.compile(r"[\\`*_\[\]<>&!]")
_STARTS = frozenset(
    {"paragraph_open", "list_item_open", "fence", "code_block", "tr_open", "heading_open", "html_block"}
)
_PROSE = frozenset({"paragraph_open", "tr_open", "heading_open"})

# The patterns below take time linear in the block: none may look far ahead from each of many places.
_COMMENT = r"<!--(?:[^-<]|-(?!->)|<(?!!--))*+-->"
"""Matches a comment that contains no start of another."""
_TAGS = (
    "a|abbr|address|article|aside|b|big|blockquote|body|br|button|caption|center|cite|code|col|colgroup|dd|del|details|"
    "dfn|div|dl|dt|em|figcaption|figure|font|footer|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|kbd|label|li|"
    "link|main|mark|meta|nav|ol|p|picture|pre|q|s|samp|script|section|small|source|span|strike|strong|style|sub|summary|"
    "sup|svg|table|tbody|td|tfoot|th|thead|time|tr|tt|u|ul|var|video|wbr"
)
_TAG = rf"</?(?:{_TAGS})(?=[\s/>])[^<>]*+>"
"""Matches tags of HTML only: `<model>` in prose is a placeholder that its author forgot to quote."""
_CODE = r"(?P<ticks>`++)[^`].*?(?<!`)(?P=ticks)(?!`)"
_LABEL = r"\[(?P<text>(?:[^\[\]\\]|\\.)*+)\]"
_DESTINATION = r"(?:<[^<>\n]*+>|[^\s()<>]*+(?:\([^\s()]*+\)[^\s()]*+)*+)"
_LINK_TITLE = r"""(?:\s++(?:"[^"]*+"|'[^']*+'|\([^()]*+\)))?"""
_LINK = rf"!?{_LABEL}(?:\(\s*+{_DESTINATION}{_LINK_TITLE}\s*+\)|\[(?P<reference>[^\[\]]*+)\])"
_HIDDEN = re.compile(
    rf"\\.|{_CODE}|(?P<comment>{_COMMENT})|(?P<tag>{_TAG})|(?P<link>{_LINK})",
    re.DOTALL | re.IGNORECASE,
)
_MAY_BE_HIDDEN = re.compile(r"\](?:\(|\[)|<[a-z/!]", re.IGNORECASE)
_HTML = re.compile(
    rf"<!--.*?(?:-->|\Z)|<(?P<name>script|style)(?=[\s>]).*?(?:</(?P=name)\s*>|\Z)|<[!?][^<>]*+>|{_TAG}",
    re.DOTALL | re.IGNORECASE,
)


def read_markdown(content: bytes, encoding: str = UTF_8) -> Extract:
    """Extract text, headings and breaks. The title is the front matter's, else the first heading of level 1."""
    source = decode_text(content, encoding)
    front = _FRONT_MATTER.match(source)
    source = source[front.end() :] if front else source
    env: dict[str, Any] = {}
    tokens = _BLOCKS.parse(source, env)
    lines = list(accumulate((len(line) + 1 for line in source.split("\n")), initial=0))
    edited = _EditedText(source, sorted(_edits(source, tokens, lines, env)))
    headings = [(edited.move(start), level, text) for start, level, text in _headings(tokens, lines)]
    starts = {edited.move(lines[token.map[0]]) for token in tokens if token.map and token.type in _STARTS}
    title = _front_title(front) or next((text for _, level, text in headings if level == 1), "")
    return Extract(edited.text, title, headings, sorted(starts - {0, len(edited.text)}))


class _Edit(NamedTuple):
    """Replaces the characters from `start` to `end` by `text`."""

    start: int
    end: int
    text: str


class _EditedText:
    """`source` after edits, which are ascending and do not overlap, in `text`. Maps offsets from one to the other."""

    def __init__(self, source: str, edits: Sequence[_Edit]) -> None:
        parts: list[str] = []
        self._ends = [0]
        self._shifts = [0]
        for edit in edits:
            parts += source[self._ends[-1] : edit.start], edit.text
            self._shifts.append(self._shifts[-1] + len(edit.text) - (edit.end - edit.start))
            self._ends.append(edit.end)
        parts.append(source[self._ends[-1] :])
        self.text = "".join(parts)

    def move(self, offset: int) -> int:
        """Return the offset in `text` of an offset in the source that lies in no edit."""
        return offset + self._shifts[bisect_right(self._ends, offset) - 1]


def _edits(source: str, tokens: list[Token], lines: list[int], env: dict[str, Any]) -> Iterator[_Edit]:
    """Yield an edit for each block that contains something hidden, and for each reference definition."""
    references = env.get("references", {})
    for definition in (*references.values(), *env.get("duplicate_refs", ())):
        start, end = _span(definition["map"], lines, source)
        yield _Edit(start, end, "")
    for token in tokens:
        if token.map is None or token.type not in _PROSE | {"html_block"}:
            continue
        start, end = _span(token.map, lines, source)
        block = source[start:end]
        shown = _HTML.sub("", block) if token.type == "html_block" else _strip_hidden(block, references)
        if shown != block:
            yield _Edit(start, end, shown)


def _span(lines_of_block: list[int], lines: list[int], source: str) -> tuple[int, int]:
    first, after = lines_of_block
    return lines[first], min(lines[after], len(source))


def _strip_hidden(block: str, references: Mapping[str, object]) -> str:
    """Replace links and images in a paragraph, heading or table row by their text; drop comments and tags.

    `references` are the document's definitions, by label in upper case. Code spans stay as they are.
    """
    if not _MAY_BE_HIDDEN.search(block):
        return block

    def show(match: re.Match[str]) -> str:
        if match["comment"] or match["tag"]:
            return ""
        if match["link"] is None or not _is_link(match, references):
            return match[0]
        return match["text"]

    # Twice, for an image within a link.
    return _HIDDEN.sub(show, _HIDDEN.sub(show, block))


def _is_link(match: re.Match[str], references: Mapping[str, object]) -> bool:
    if match["reference"] is None:
        return True
    label = match["reference"] or match["text"]
    return " ".join(label.split()).upper() in references


def _headings(tokens: list[Token], lines: list[int]) -> Iterator[tuple[int, int, str]]:
    for token, inside in pairwise(tokens):
        if token.type == "heading_open" and token.map is not None:
            text = format_label(_render(inside.content))
            if text:
                yield lines[token.map[0]], int(token.tag[1]), text


def _render(content: str) -> str:
    """Return a heading's text without its markup."""
    if not _MARKED_UP.search(content):
        return content
    (inline,) = _INLINE.parseInline(content)
    shown = {"softbreak": " ", "html_inline": ""}
    return "".join(shown.get(child.type, child.content) for child in inline.children or ())


def _front_title(front: re.Match[str] | None) -> str:
    found = _FRONT_TITLE.search(front.group(2) or "") if front else None
    return format_label(found.group(1).strip("\"'")) if found else ""
