"""Reads HTML: the main content of a page, written as light Markdown."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from selectolax.lexbor import LexborHTMLParser

from sluice.errors import invalid
from sluice.pipelines.rag.documents.extract import (
    UTF_8,
    Extract,
    decode_text,
    find_declaration,
    find_encoding,
    find_mark,
    format_label,
)

LINE, BLOCK = "\n", "\n\n"
_GAPS = ("", " ", LINE, BLOCK)
_DECLARED_WITHIN = 1024
"""Bytes in which a page has to declare its encoding, by the HTML Standard."""
_DECLARED_LATE_WITHIN = 64 << 10
"""Bytes in which a declaration is looked for that comes too late: parsers start again when they meet it."""

_WORD = re.compile(r"\w+")
_MAIN = ("main", "[role=main]", "article")
_AROUND_MAIN = frozenset({"header", "aside"})
"""Elements that are content within the main part of a page, and none around it."""
_NO_CONTENT = frozenset(
    _WORD.findall(
        "audio button canvas datalist embed footer head iframe input map math nav noscript object script select "
        "style svg template textarea video"
    )
)
_NOT_SHOWN = (
    "[hidden], [aria-hidden=true], [role=navigation], [role=banner], [role=contentinfo], [role=search], a.headerlink"
)

_BLOCKS = frozenset(
    _WORD.findall(
        "address article aside blockquote body caption center dd details dialog div dl fieldset figcaption figure "
        "form header hgroup hr legend main ol p section summary tbody tfoot thead ul"
    )
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_LISTS = frozenset({"ul", "ol"})
_CELLS = frozenset({"td", "th"})
_IN_LAYOUT = "table, pre, ul, ol, dl, h1, h2, h3, h4, h5, h6"
"""Selects what no data table has in its cells. A table that has any of it is a page layout."""
_MAX_INDENT = 10


class TextWriter:
    """Collects pieces of text as light Markdown, the form that language models know best. The widest requested gap
    separates two pieces; none stands at the start or the end."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._gap = ""
        self._prefix = ""
        self._is_break = False
        self._headings: list[tuple[int, int, str]] = []
        self._breaks: list[int] = []
        self._heading: tuple[int, int] | None = None

    def separate(self, gap: str, *, is_break: bool = False) -> None:
        """Put at least `gap` before the next text. With `is_break`, a chunk may end here."""
        self._gap = max(self._gap, gap, key=_GAPS.index)
        self._is_break |= is_break

    def prefix(self, mark: str) -> None:
        """Put `mark` right before the next text. It replaces a mark that no text has followed."""
        self._prefix = mark

    def inline(self, text: str) -> None:
        """Write text in which any white space means one space."""
        words = " ".join(text.split())
        if text[:1].isspace():
            self.separate(" ")
        if words:
            self._write(words)
            if text[-1:].isspace():
                self.separate(" ")

    def verbatim(self, text: str) -> None:
        """Write a fenced code block."""
        text = text.strip("\n")
        if not text or text.isspace():
            return
        fence = "```"
        while fence in text:
            fence += "`"
        self.separate(BLOCK, is_break=True)
        self._write(f"{fence}\n{text.rstrip()}\n{fence}")
        self.separate(BLOCK, is_break=True)

    def open_heading(self, level: int) -> None:
        self.separate(BLOCK, is_break=True)
        self.prefix("#" * level + " ")
        if self._heading is None:
            self._heading = len(self._parts), level

    def close_heading(self) -> None:
        self.separate(BLOCK, is_break=True)
        self._prefix = ""
        if self._heading is None:
            return
        first, level = self._heading
        self._heading = None
        text = "".join(self._parts[first:])
        label = format_label(text.strip().lstrip("#"))
        if label:
            start = self._length - len(text.lstrip())
            self._headings.append((start, level, label))

    def extract(self, title: str) -> Extract:
        """Return all that was written. The title is the only heading of level 1, else `title`."""
        top_headings = [text for _, level, text in self._headings if level == 1]
        if len(top_headings) == 1:
            title = top_headings[0]
        return Extract("".join(self._parts), format_label(title), self._headings, self._breaks)

    def _write(self, text: str) -> None:
        gap = self._gap if self._parts else ""
        start = self._length + len(gap)
        if self._is_break and start:
            self._breaks.append(start)
        piece = f"{gap}{self._prefix}{text}"
        self._parts.append(piece)
        self._length += len(piece)
        self._gap = self._prefix = ""
        self._is_break = False


class _Visit(NamedTuple):
    """A piece of text, or the start or end of an element."""

    tag: str
    node: Any
    is_end: bool = False


def read_html(content: bytes, encoding: str = "") -> Extract:
    """Extract the text of the page's main element. The title is its only h1, else the page's title.

    `encoding` is what the sender says that the page is in, which counts for more than what the page declares.
    """
    tree = LexborHTMLParser(_decode(content, encoding))
    title = tree.css_first("title")
    extract = _extract(tree, _find_main(tree), "" if title is None else title.text())
    return extract if extract.text or tree.body is None else _extract(tree, tree.body, extract.title)


def _decode(content: bytes, encoding: str) -> str:
    """Decode a page by its byte order mark, the sender's word, its declaration, or else as UTF-8."""
    encoding = find_mark(content) or encoding or _declared(content[:_DECLARED_WITHIN])
    if encoding:
        return decode_text(content, encoding, replaces=True)
    if _is_mostly_utf_8(content):
        return decode_text(content, replaces=True)
    late = _declared(content[:_DECLARED_LATE_WITHIN])
    return decode_text(content, late or UTF_8, replaces=bool(late))


def _declared(page: bytes) -> str:
    label = find_declaration(page)
    encoding = find_encoding(label)
    if label and not encoding:
        problem = f"the page declares the encoding {label[:40]!r}, which the Encoding Standard no longer reads"
        raise invalid("content", problem)
    return encoding


def _is_mostly_utf_8(content: bytes) -> bool:
    """Whether more characters beyond ASCII are UTF-8 than are not. Text in other encodings hardly has any that are.

    Zero bytes are in UTF-16.
    """
    text = content.decode(errors="replace")
    num_bad = text.count("\ufffd")
    return "\0" not in text and (not num_bad or len(text) - len(text.encode("ascii", "ignore")) > 2 * num_bad)


def _find_main(tree: LexborHTMLParser) -> Any:
    for selector in _MAIN:
        found = tree.css(selector)
        if len(found) == 1:
            return found[0]
    return tree.body


def _extract(tree: LexborHTMLParser, root: Any, title: str) -> Extract:
    if root is None:
        return Extract("", title)
    not_shown = {node.mem_id for node in tree.css(_NOT_SHOWN)} - {root.mem_id}
    skipped = _NO_CONTENT if root.tag != "body" else _NO_CONTENT | _AROUND_MAIN
    elements = _ElementWriter()
    for visit in _walk(root, lambda tag, node: tag in skipped or node.mem_id in not_shown):
        if visit.tag == "-text":
            elements.text(visit.node.text_content or "")
        elif visit.is_end:
            elements.end(visit.tag)
        else:
            elements.start(visit.tag, visit.node)
    return elements.writer.extract(title)


def _walk(root: Any, is_skipped: Callable[[str, Any], bool]) -> Iterator[_Visit]:
    """Yield the tree in document order. Does not recurse: pages may be nested a hundred thousand levels deep."""
    above: list[tuple[str, Any]] = []
    node = root
    while True:
        tag = node.tag or ""
        if tag == "-text":
            yield _Visit(tag, node)
        elif not tag.startswith("-") and not (above and is_skipped(tag, node)):
            yield _Visit(tag, node)
            child = node.first_child
            if child is not None:
                above.append((tag, node))
                node = child
                continue
            yield _Visit(tag, node, is_end=True)
        while above and node.next is None:
            tag, node = above.pop()
            yield _Visit(tag, node, is_end=True)
        if not above:
            return
        node = node.next


class _ElementWriter:
    """Writes the elements and texts of a page, which come in document order, to `writer`."""

    def __init__(self) -> None:
        self.writer = TextWriter()
        self._code: list[str] = []
        self._code_depth = 0
        self._lists: list[int | None] = []
        """The number of the last item in each open list, outermost first; None for an unordered list."""
        self._is_layout: list[bool] = []
        """Whether each open table, outermost first, is a page layout."""
        self._is_first_cell = True

    def text(self, text: str) -> None:
        if self._code_depth:
            self._code.append(text)
        else:
            self.writer.inline(text)

    def start(self, tag: str, node: Any) -> None:
        if self._code_depth:
            self._start_in_code(tag)
        elif tag == "pre":
            self._code_depth = 1
        elif tag == "table":
            self._is_layout.append(_is_layout_table(node))
            self.writer.separate(BLOCK, is_break=True)
        elif self._is_in_data():
            self._start_in_data(tag)
        else:
            self._start_block(tag)
        if tag == "img":
            self.text(node.attributes.get("alt") or "")

    def end(self, tag: str) -> None:
        if self._code_depth:
            self._end_in_code(tag)
        elif tag == "table" and self._is_layout:
            self._is_layout.pop()
            self.writer.separate(BLOCK, is_break=True)
        elif self._is_in_data():
            self.writer.separate(" " if tag in _BLOCKS else "")
        elif tag in _HEADINGS:
            self.writer.close_heading()
        elif tag in _BLOCKS or tag in _CELLS:
            self._end_block(tag)

    def _start_in_code(self, tag: str) -> None:
        self._code_depth += tag == "pre"
        if tag == "br":
            self._code.append("\n")

    def _end_in_code(self, tag: str) -> None:
        self._code_depth -= tag == "pre"
        if not self._code_depth:
            self.writer.verbatim("".join(self._code))
            self._code.clear()

    def _is_in_data(self) -> bool:
        return bool(self._is_layout) and not self._is_layout[-1]

    def _start_in_data(self, tag: str) -> None:
        """Start an element of a data table, which is written as one line for each row."""
        if tag == "tr":
            self.writer.separate(LINE, is_break=True)
            self._is_first_cell = True
        elif tag in _CELLS:
            if not self._is_first_cell:
                self.writer.inline(" | ")
            self._is_first_cell = False
        elif tag in _BLOCKS or tag == "br":
            self.writer.separate(" ")

    def _start_block(self, tag: str) -> None:
        if tag in _HEADINGS:
            self.writer.open_heading(_HEADINGS[tag])
        elif tag in _BLOCKS or tag in _CELLS or tag == "dt":
            self.writer.separate(LINE if tag == "dd" else BLOCK, is_break=tag != "dd")
            if tag in _LISTS:
                self._lists.append(0 if tag == "ol" else None)
        elif tag == "li":
            self.writer.separate(LINE, is_break=True)
            self.writer.prefix(self._item_mark())
        elif tag == "br":
            self.writer.separate(LINE)

    def _end_block(self, tag: str) -> None:
        self.writer.separate(BLOCK, is_break=True)
        if tag in _LISTS and self._lists:
            self._lists.pop()

    def _item_mark(self) -> str:
        indent = "  " * min(max(len(self._lists) - 1, 0), _MAX_INDENT)
        number = self._lists[-1] if self._lists else None
        if number is None:
            return f"{indent}- "
        self._lists[-1] = number + 1
        return f"{indent}{number + 1}. "


def _is_layout_table(table: Any) -> bool:
    child = table.first_child
    while child is not None:
        if child.css_first(_IN_LAYOUT) is not None:
            return True
        child = child.next
    return False
