"""Writes structured text as light Markdown, the form that language models know best."""

from sluice.pipelines.rag.documents.extract import Extract, format_label

LINE, BLOCK = "\n", "\n\n"
_GAPS = ("", " ", LINE, BLOCK)


class TextWriter:
    """Collects pieces of text. The widest requested gap separates two pieces; none stands at the start or the end."""

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
