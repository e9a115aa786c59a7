"""The drawings of the documentation: `python -m tests.tools.drawings` writes them to docs/drawings.

Each is a list of boxes, arrows and notes with coordinates in pixels. A test compares the files with what this makes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tests.paths import DOCS

FOLDER = DOCS / "drawings"
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


def tower() -> str:
    """Draw the packages, one floor above the other: a floor imports only what stands below it."""
    return picture(
        "The packages of Sluice: every import points down",
        860,
        486,
        [
            Box(
                20,
                20,
                590,
                50,
                "cli/",
                ["one file or folder for each command: serve, load, tune, repository, rag, build"],
            ),
            Box(
                20,
                84,
                590,
                84,
                "gateway/",
                [
                    "protocols and the process around them: OpenAI and Triton v2 over HTTP, SSE and gRPC,",
                    "RAG, metrics; service.py is the one data plane under all of them",
                    "http/ (openai, v2, rag)   grpc/   v2/   telemetry/   options/",
                ],
                "accent",
            ),
            Box(
                20,
                182,
                590,
                67,
                "pipelines/",
                [
                    "text in, text out: chat templates, tokens and text, hosted models, RAG with citations",
                    "text/   llm/   stages/   remote/   rag/",
                ],
                "accent",
            ),
            Box(
                20,
                263,
                288,
                135,
                "serving/",
                [
                    "a Triton model server without protocols:",
                    "repository, versions, config.pbtxt, batching,",
                    "sequences, response cache",
                    "backends: onnxruntime, openvino, pytorch,",
                    "tensorflow, tensorrt, python, ensemble",
                ],
                "green",
            ),
            Box(
                322,
                263,
                288,
                135,
                "engine/",
                [
                    "token ids in, token events out:",
                    "scheduler, paged KV cache, prefix cache,",
                    "sampling, grammars, speculation",
                    "runners/openvino: our executor on a CPU",
                    "delegated/tensorrt_llm: NVIDIA GPUs",
                ],
                "warm",
            ),
            Box(
                20, 412, 590, 50, "sluice/", ["errors, backoff, GPU count, version; the public names, looked up lazily"]
            ),
            Box(640, 118, 200, 67, "tuning/", ["searches settings: drives", "servers and the simulator"]),
            Arrow([(740, 185), (740, 263)], "measures with", label_at=(750, 228)),
            Box(640, 263, 200, 67, "load/", ["load generator: speaks the", "wire, imports none of ours"]),
            Box(640, 345, 200, 53, "models/", ["the bundled repository"]),
            Note(640, 40, "Every import points down."),
            Note(640, 58, "serving/ and engine/ know"),
            Note(640, 76, "nothing of each other: they"),
            Note(640, 94, "meet in pipelines/llm."),
        ],
    )


def processes() -> str:
    """Draw the processes of one server and what travels between them."""
    return picture(
        "The processes of a server",
        920,
        420,
        [
            Box(40, 16, 250, 84, "Clients", ["openai, curl, browsers", "tritonclient, perf_analyzer", "Prometheus"]),
            Frame(20, 150, 560, 250, "gateway process: asyncio on uvloop"),
            Box(
                40,
                168,
                250,
                84,
                "Protocols",
                ["HTTP :8000  OpenAI, v2, RAG", "gRPC :8001  v2", "metrics :8002"],
                "accent",
            ),
            Box(
                310,
                168,
                250,
                84,
                "Pipelines",
                ["chat templates, tokens and text", "RAG, hosted models", "language models"],
                "accent",
            ),
            Box(
                310,
                292,
                250,
                84,
                "Engine client",
                ["submits, cancels, merges events", "supervises: heartbeat, restart", "resumes streams after a crash"],
                "warm",
            ),
            Box(
                40,
                292,
                250,
                84,
                "Model repository",
                ["versions, batching, sequences", "response cache, ensembles", "in-process backends (ONNX, …)"],
                "green",
            ),
            Box(
                660,
                150,
                240,
                118,
                "Engine process",
                [
                    "one for each version of an LLM",
                    "queue, admission, planner,",
                    "KV blocks, sampling",
                    "runner: OpenVINO",
                    "or TensorRT-LLM and its ranks",
                ],
                "warm",
            ),
            Box(
                660,
                300,
                240,
                84,
                "Worker process",
                ["one for each instance", "of a Python model", "large tensors in shared memory"],
                "green",
            ),
            Arrow([(262, 100), (262, 168)], "", True),
            Note(272, 126, "HTTP, SSE, gRPC"),
            Arrow([(290, 210), (310, 210)], "", True),
            Arrow([(435, 252), (435, 292)], "", True),
            Arrow([(165, 292), (165, 252)], "", True),
            Arrow([(560, 322), (610, 322), (610, 210), (660, 210)], "", True),
            Note(612, 120, "ZeroMQ, msgpack frames: commands down,"),
            Note(612, 136, "one frame of token events a step up"),
            Arrow([(165, 376), (165, 390), (630, 390), (630, 342), (660, 342)], "", True),
        ],
    )


def _sequence(
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


def workers() -> str:
    """Draw a server with HTTP workers."""
    return picture(
        "A server with two HTTP workers: clients, workers, host and engine",
        860,
        380,
        [
            Box(20, 120, 140, 92, "clients", ["one port: each", "connection belongs", "to one worker"]),
            Frame(210, 50, 240, 262, "one port, one socket for each worker"),
            Box(
                230,
                70,
                200,
                101,
                "worker 1",
                ["HTTP, keys, tokenizer, and", "the streams of language", "models"],
                "accent",
            ),
            Box(
                230,
                191,
                200,
                101,
                "worker 2",
                ["the same; replaced after", "a crash, and one by one", "on SIGHUP"],
                "accent",
            ),
            Box(
                560,
                170,
                280,
                142,
                "host: the first process",
                [
                    "all other routes and models, documents,",
                    "responses, files, quotas, gRPC;",
                    "starts and watches workers and engines,",
                    "answers in the place of a lost worker,",
                    "sums the metrics",
                ],
                "warm",
            ),
            Box(
                560,
                30,
                280,
                67,
                "engine: one a model",
                ["admits, batches, computes:", "one queue for all gateways"],
                "green",
            ),
            Arrow([(160, 150), (230, 120)]),
            Arrow([(160, 180), (230, 235)]),
            Arrow([(430, 105), (560, 65)], "tokens", is_both=True, label_at=(450, 72)),
            Arrow([(430, 225), (600, 97)], is_both=True),
            Arrow([(430, 140), (560, 215)], is_both=True),
            Arrow([(430, 262), (560, 250)], "the rest", is_both=True, label_at=(470, 285)),
            Arrow([(760, 170), (760, 97)], is_both=True),
            Note(20, 350, "Keys and the ledger are in stores that every process reads or writes by itself."),
        ],
    )


def chat_request() -> str:
    """Draw the path of a streamed chat request."""
    return _sequence(
        "A streamed chat request",
        1180,
        [
            ("Client", "POST /v1/chat/completions", ""),
            ("gateway/http/openai", "schemas, SSE frames", "accent"),
            ("gateway/service.py", "the one data plane", "accent"),
            ("pipelines/llm, text", "template, tokenizer", "accent"),
            ("engine/client", "EngineClient", "warm"),
            ("engine/loop", "InflightExecutor", "warm"),
        ],
        [
            (0, 1, "JSON body, checked once"),
            (1, 2, "TextRequest"),
            (2, 3, "of that model or adapter"),
            (3, 4, "GenerateRequest: token ids"),
            (4, 5, "Submit: queued or rejected"),
            (5, 5, "plan, run, sample, commit"),
            (5, 4, "one frame a step"),
            (4, 3, "TokenEvents, merged"),
            (3, 1, "TextEvents: text, stop strings, logprobs"),
            (1, 0, "data: {…} chunks"),
            (0, 1, "disconnect, or the end"),
            (1, 5, "the same finally: Cancel frees the blocks within the step"),
        ],
    )


def infer_request() -> str:
    """Draw the path of a Triton inference request."""
    return _sequence(
        "A Triton inference request",
        1180,
        [
            ("Client", "infer, ModelInfer", ""),
            ("gateway/http, grpc", "JSON, bytes, protobuf", "accent"),
            ("gateway/service.py", "the one data plane", "accent"),
            ("serving", "Model, InferJob", "green"),
            ("serving/batching", "Batcher, InstancePool", "green"),
            ("serving/backends", "Instance: ONNX, Python …", "green"),
        ],
        [
            (0, 1, "tensors, or their regions"),
            (1, 2, "model, version, sticky key"),
            (1, 3, "InferRequest: names, shapes and types checked"),
            (3, 4, "InferJob: cache, then queue"),
            (4, 5, "a batch, a free instance"),
            (5, 4, "outputs, split by request"),
            (4, 3, "responses, statistics"),
            (3, 1, "InferResponse: one, or many of a decoupled model"),
            (1, 0, "the protocol's own shape"),
        ],
    )


DRAWINGS = {
    "tower.svg": tower,
    "processes.svg": processes,
    "workers.svg": workers,
    "chat-request.svg": chat_request,
    "infer-request.svg": infer_request,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw())
        sys.stdout.write(f"{FOLDER / name}\n")


if __name__ == "__main__":
    main()
