"""Writes small PDFs, with only what tests need of the format."""

from collections.abc import Sequence
from dataclasses import dataclass, field

LINE_POINTS = 14
FONT, ROOT, TREE, UNICODE = 3, 1, 2, 4
ASTRAL = "~"
"""The byte that stands for U+1F600, which the font maps to that character."""
_TO_UNICODE = (
    b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap 1 begincodespacerange <00> <FF> endcodespacerange "
    b"1 beginbfchar <7E> <D83DDE00> endbfchar endcmap end end"
)


@dataclass
class Pdf:
    """Pages are lists of lines; an empty line is a gap between paragraphs. `outline`: (title, page, level) in order."""

    pages: Sequence[Sequence[str]]
    title: str = ""
    outline: Sequence[tuple[str, int, int]] = ()
    trailer: str = ""
    extra_kids: int = 0
    """How many more times the first page stands in the tree of pages."""
    padding_bytes: int = 0
    """The length of a stream that no page uses, as of an attachment."""
    _objects: list[bytes] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/ToUnicode %d 0 R>>" % UNICODE
        self._objects = [b"", b"", font, _stream(_TO_UNICODE)]
        kids = [self._page(lines) for lines in self.pages]
        outline = f"/Outlines {self._outline(kids)} 0 R" if self.outline else ""
        kids += kids[:1] * self.extra_kids
        references = " ".join(f"{kid} 0 R" for kid in kids)
        self._objects[ROOT - 1] = f"<</Type/Catalog/Pages {TREE} 0 R{outline}>>".encode()
        self._objects[TREE - 1] = f"<</Type/Pages/Count {len(kids)}/Kids[{references}]>>".encode()
        if self.padding_bytes:
            self._add(_stream(bytes(self.padding_bytes)))
        about = self._add(f"<</Title({self.title})>>".encode())
        return self._file(about)

    def _page(self, lines: Sequence[str]) -> int:
        shown = (f"({_escaped(line)}) Tj T*" if line else "T*" for line in lines)
        stream = f"BT /F1 12 Tf {LINE_POINTS} TL 72 720 Td {' '.join(shown)} ET".encode("latin-1")
        contents = self._add(_stream(stream))
        return self._add(
            f"<</Type/Page/Parent {TREE} 0 R/MediaBox[0 0 612 792]/Contents {contents} 0 R"
            f"/Resources<</Font<</F1 {FONT} 0 R>>>>>>".encode()
        )

    def _outline(self, kids: Sequence[int]) -> int:
        """Write bookmarks as siblings, or each as the child of the one before, by their levels."""
        root = self._add(b"")
        numbers = [self._add(b"") for _ in self.outline]
        levels = [0, *(level for _, _, level in self.outline)]
        nodes = [root, *numbers]
        for index, (title, page, level) in enumerate(self.outline, 1):
            parent = next(nodes[i] for i in range(index - 1, -1, -1) if levels[i] < level)
            sibling = next((i for i in range(index + 1, len(nodes)) if levels[i] <= level), None)
            fields = f"/Title({_escaped(title)})/Parent {parent} 0 R/Dest[{kids[page]} 0 R/Fit]"
            if index + 1 < len(nodes) and levels[index + 1] > level:
                fields += f"/First {nodes[index + 1]} 0 R/Last {nodes[index + 1]} 0 R"
            if sibling is not None and levels[sibling] == level:
                fields += f"/Next {nodes[sibling]} 0 R"
            self._objects[nodes[index] - 1] = f"<<{fields}>>".encode()
        self._objects[root - 1] = f"<</Type/Outlines/First {numbers[0]} 0 R/Last {numbers[-1]} 0 R>>".encode()
        return root

    def _add(self, content: bytes) -> int:
        self._objects.append(content)
        return len(self._objects)

    def _file(self, about: int) -> bytes:
        out = bytearray(b"%PDF-1.7\n")
        offsets = []
        for number, content in enumerate(self._objects, 1):
            offsets.append(len(out))
            out += b"%d 0 obj%bendobj\n" % (number, content)
        table = len(out)
        out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(offsets) + 1)
        out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
        trailer = f"/Size {len(offsets) + 1}/Root {ROOT} 0 R/Info {about} 0 R{self.trailer}"
        return bytes(out) + f"trailer<<{trailer}>>\nstartxref\n{table}\n%%EOF\n".encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


def _stream(content: bytes) -> bytes:
    return b"<</Length %d>>stream\n%b\nendstream" % (len(content), content)
