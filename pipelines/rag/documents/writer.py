"""Writes text with structure, in the form that language models know best: light Markdown."""

from pipelines.rag.documents.extract import Extract, as_label

LINE, BLOCK = "\n", "\n\n"
_GAPS = ("", " ", LINE, BLOCK)


class TextWriter:
    """Collects text; between two pieces stands the widest gap that was asked for, and none at the start or the end."""

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
        """At least `gap` before the next text; `is_break`: a chunk may end here."""
        self._gap = max(self._gap, gap, key=_GAPS.index)
        self._is_break |= is_break

    def prefix(self, mark: str) -> None:
        """`mark` right before the next text, if any comes: in the place of a mark that no text has followed."""
        self._prefix = mark

    def inline(self, text: str) -> None:
        """Text in which white space means no more than a space."""
        words = " ".join(text.split())
        if text[:1].isspace():
            self.separate(" ")
        if words:
            self._write(words)
            if text[-1:].isspace():
                self.separate(" ")

    def verbatim(self, text: str) -> None:
        """A piece of code, fenced."""
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
        label = as_label(text.strip().lstrip("#"))
        if label:
            start = self._length - len(text.lstrip())
            self._headings.append((start, level, label))

    def extract(self, title: str) -> Extract:
        """All of it. The title is `title`, else the only heading of level 1."""
        of_level_1 = [text for _, level, text in self._headings if level == 1]
        if len(of_level_1) == 1:
            title = of_level_1[0]
        return Extract("".join(self._parts), as_label(title), self._headings, self._breaks)

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
