"""What HTML's elements mean for the text of a document."""

from typing import Any

from pipelines.rag.documents.writer import BLOCK, LINE, TextWriter

_BLOCKS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "caption",
        "center",
        "dd",
        "details",
        "dialog",
        "div",
        "dl",
        "fieldset",
        "figcaption",
        "figure",
        "form",
        "header",
        "hgroup",
        "hr",
        "legend",
        "main",
        "ol",
        "p",
        "section",
        "summary",
        "tbody",
        "tfoot",
        "thead",
        "ul",
    ]
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_LISTS = frozenset({"ul", "ol"})
_CELLS = frozenset({"td", "th"})
_IN_LAYOUT = "table, pre, ul, ol, dl, h1, h2, h3, h4, h5, h6"
"""What no table of data has in its cells: one that has it arranges a page."""
_MAX_INDENT = 10


class ElementWriter:
    """Told of elements and texts in the document's order; its `writer` has what they come to."""

    def __init__(self) -> None:
        self.writer = TextWriter()
        self._code: list[str] = []
        self._code_depth = 0
        self._lists: list[int | None] = []
        """Of each open list: the number of its last item, None where items have none."""
        self._is_layout: list[bool] = []
        """Of each open table."""
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
            self._is_layout.append(_arranges(node))
            self.writer.separate(BLOCK, is_break=True)
        elif self._is_in_data():
            self._start_in_data(tag)
        else:
            self._start_of_block(tag)
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
            self._end_of_block(tag)

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
        """A table of data: a line for each row, whatever stands in the cells."""
        if tag == "tr":
            self.writer.separate(LINE, is_break=True)
            self._is_first_cell = True
        elif tag in _CELLS:
            if not self._is_first_cell:
                self.writer.inline(" | ")
            self._is_first_cell = False
        elif tag in _BLOCKS or tag == "br":
            self.writer.separate(" ")

    def _start_of_block(self, tag: str) -> None:
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

    def _end_of_block(self, tag: str) -> None:
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


def _arranges(table: Any) -> bool:
    child = table.first_child
    while child is not None:
        if child.css_first(_IN_LAYOUT) is not None:
            return True
        child = child.next
    return False
