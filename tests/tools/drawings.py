"""The drawings of the documentation: `python -m tests.tools.drawings` writes them to docs/drawings.

Each is a list of boxes, arrows and notes with coordinates in pixels. A test compares the files with what this makes.
"""

import sys

from tests.paths import DOCS
from tests.tools.shapes import Arrow, Box, Frame, Note, picture, sequence

FOLDER = DOCS / "drawings"


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
                    "protocols and the process around them: OpenAI, Anthropic, Ollama, RAG, Triton v2;",
                    "keys, quotas, metrics; plane/ is the one data plane under all of them",
                    "front/  api/  plane/  answers/  tenancy/  telemetry/  watch/  workers/  options/",
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
                    "text/  chat/  llm/  stages/  remote/  encoding/  rag/  routes/  answers/",
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
                *(20, 412, 590, 50),
                "record/   state/   sluice/",
                ["spans, histograms; stores, leases; errors, backoff, version, the public names"],
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
                ["a whole server over the", "same engines, with copies of", "models that keep nothing"],
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
                    "all other models and routes, responses,",
                    "files, kept streams, quotas, gRPC;",
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
            Arrow([(430, 105), (560, 65)], "tokens", is_both=True, label_at=(464, 72)),
            Arrow([(430, 225), (600, 97)], is_both=True),
            Arrow([(430, 140), (560, 215)], is_both=True),
            Arrow([(430, 262), (560, 250)], "the rest", is_both=True, label_at=(470, 285)),
            Arrow([(760, 170), (760, 97)], is_both=True),
            Note(20, 350, "Keys and the ledger are in stores that every process reads or writes by itself."),
        ],
    )


def chat_request() -> str:
    """Draw the path of a streamed chat request."""
    return sequence(
        "A streamed chat request",
        1180,
        [
            ("Client", "POST /v1/chat/completions", ""),
            ("gateway/api", "translators, SSE frames", "accent"),
            ("gateway/plane", "the one data plane", "accent"),
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
    return sequence(
        "A Triton inference request",
        1180,
        [
            ("Client", "infer, ModelInfer", ""),
            ("gateway/api/v2", "JSON, bytes, protobuf", "accent"),
            ("gateway/plane", "models, versions", "accent"),
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
