"""Shapes of which drawings are made, with coordinates in pixels, and the SVG documents that show them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

LINE_HEIGHT = 17
STYLE = """
  text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
  .title { font-weight: 600; font-size: 14px; }
  .note { fill: #52606d; font-size: 12px; }
  .label { fill: #3e4c59; font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
  .step { font-weight: 600; fill: #0b69a3; font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
  .box { fill: #ffffff; stroke: #9aa5b1; stroke-width: 1.2; }
  .accent { fill: #e6f6ff; stroke: #2186eb; }
  .warm { fill: #fff3e0; stroke: #de911d; }
  .green { fill: #e3f9e5; stroke: #3f9142; }
  .frame { fill: none; stroke: #9aa5b1; stroke-dasharray: 5 4; }
  .arrow { fill: none; stroke: #52606d; stroke-width: 1.4; marker-end: url(#head); }
  .both { marker-start: url(#head); }
  .lane { stroke: #cbd2d9; stroke-width: 1.2; }
  .head { fill: #52606d; }
  .page { fill: #ffffff; }
"""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines below it."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: Sequence[str] = ()
    kind: str = ""

    def svg(self) -> Iterator[str]:
        yield _rectangle(f"box {self.kind}", self.x, self.y, self.width, self.height)
        yield _text(self.x + 12, self.y + 22, self.title, "title")
        for number, line in enumerate(self.lines, 1):
            yield _text(self.x + 12, self.y + 24 + number * LINE_HEIGHT, line, "note")


@dataclass(frozen=True, slots=True)
class Frame:
    """A dashed rectangle around boxes, with its name above the upper left corner."""

    x: int
    y: int
    width: int
    height: int
    title: str

    def svg(self) -> Iterator[str]:
        yield _rectangle("frame", self.x, self.y, self.width, self.height)
        yield _text(self.x + 10, self.y - 7, self.title, "note")


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line through points, with a head at its end and perhaps a label beside its middle."""

    points: Sequence[tuple[int, int]]
    label: str = ""
    is_both: bool = False
    label_at: tuple[int, int] | None = None

    def svg(self) -> Iterator[str]:
        path = " ".join(f"{'M' if number == 0 else 'L'}{x} {y}" for number, (x, y) in enumerate(self.points))
        yield f'<path class="arrow{" both" if self.is_both else ""}" d="{path}"/>'
        if self.label:
            (x1, y1), (x2, y2) = self.points[0], self.points[-1]
            x, y = self.label_at or ((x1 + x2) // 2 + 8, (y1 + y2) // 2 - 5)
            yield _text(x, y, self.label, "label")


@dataclass(frozen=True, slots=True)
class Lane:
    """The line down from a participant of a sequence."""

    x: int
    top: int
    bottom: int

    def svg(self) -> Iterator[str]:
        yield f'<path class="lane" d="M{self.x} {self.top} L{self.x} {self.bottom}"/>'


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text."""

    x: int
    y: int
    text: str
    kind: str = "note"

    def svg(self) -> Iterator[str]:
        yield _text(self.x, self.y, self.text, self.kind)


Shape = Box | Frame | Arrow | Lane | Note


def _rectangle(kind: str, x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def picture(title: str, width: int, height: int, shapes: Sequence[Shape]) -> str:
    """Return an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
        f' aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
        f'<rect class="page" width="{width}" height="{height}"/>',
        *(line for shape in shapes for line in shape.svg()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def sequence(
    title: str, width: int, lanes: Sequence[tuple[str, str, str]], steps: Sequence[tuple[int, int, str]]
) -> str:
    """Draw a request's path.

    `lanes` are (title, line, kind), `steps` (from lane, to lane, text); a step within one lane is a note beside it.
    """
    gap = (width - 40) // len(lanes)
    centers = [20 + gap * index + gap // 2 for index in range(len(lanes))]
    height = 110 + 44 * len(steps)
    shapes: list[Shape] = [
        Box(center - gap // 2 + 6, 16, gap - 12, 50, name, [line], kind)
        for center, (name, line, kind) in zip(centers, lanes, strict=True)
    ]
    shapes[:0] = [Lane(center, 66, height - 16) for center in centers]
    for number, (start, end, text) in enumerate(steps, 1):
        y = 62 + 44 * number
        left = min(centers[start], centers[end]) + 10
        if start != end:
            shapes.append(Arrow([(centers[start], y + 8), (centers[end], y + 8)]))
        elif end == len(lanes) - 1:
            left -= 120
        shapes.append(Note(left, y, f"{number}", "step"))
        shapes.append(Note(left + 13 + 7 * (number > 9), y, text, "label"))
    return picture(title, width, height, shapes)
