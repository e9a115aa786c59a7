"""Models that break their own configuration."""

from collections.abc import Iterator

from tests.triton.exam.ask import grpc_tensor, infer, inputs, length_prefixed, model_infer, tensor
from tests.triton.records import Exchange

WAYS = (
    "well",
    "datatype",
    "shape",
    "rank",
    "batch",
    "missing",
    "extra",
    "swapped",
    "key error",
    "error and outputs",
    "text",
    "too few",
)


def questions() -> Iterator[Exchange]:
    for how in WAYS:
        name = how.replace(" ", "_")
        yield infer(f"fault/{name}", "misbehave", inputs(tensor("HOW", "BYTES", [1, 1], [how])))
        raw = [length_prefixed(how.encode())]
        yield model_infer(f"fault/{name}", "misbehave", [grpc_tensor("HOW", "BYTES", [1, 1])], raw)
    wanted = inputs(tensor("HOW", "BYTES", [1, 1], ["extra"]), outputs=[{"name": "M"}])
    yield infer("fault/extra_one_asked", "misbehave", wanted)
    absent = inputs(tensor("HOW", "BYTES", [1, 1], ["missing"]), outputs=[{"name": "M"}])
    yield infer("fault/missing_asked", "misbehave", absent)
