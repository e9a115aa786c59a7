from pathlib import Path

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.caching.response_cache import LocalCache, fingerprint, request_key
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.statistics import FailureReason
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import AtOnceInstance, Client, HeldInstance, config_of, model_of, request
from tests.serving.caching.parts import CACHED, cached_model

RESHAPED = """
name: "echo" backend: "test" max_batch_size: 8 response_cache { enable: true }
input { name: "X" data_type: TYPE_INT32 dims: [ -1, 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1, -1 ] reshape { shape: [ -1, 1 ] } }
"""


def asked(**values: object) -> InferRequest:
    return InferRequest({name: Tensor.of(name, np.array(value)) for name, value in values.items()})


def key(request: InferRequest, scope: bytes = b"m:1") -> bytes:
    return request_key(request, scope)


def response(size: int = 1) -> InferResponse:
    return InferResponse([Tensor.of("Y", np.zeros(size, np.uint8))], {"p": 1})


def test_equal_requests_have_equal_keys() -> None:
    assert key(asked(a=[1, 2], b=[3])) == key(asked(b=[3], a=[1, 2]))
    array = np.arange(3, dtype=np.int32)
    by_bytes = InferRequest({"a": Tensor("a", "INT32", (3,), array.tobytes())})
    assert key(by_bytes) == key(InferRequest({"a": Tensor.of("a", array)}))


@pytest.mark.parametrize(
    "other",
    [asked(a=[1, 3]), asked(b=[1, 2]), asked(a=[[1, 2]]), asked(a=[1.0, 2.0]), asked(a=[1, 2], b=[1]), asked()],
)
def test_others_have_others(other: InferRequest) -> None:
    assert key(other) != key(asked(a=[1, 2]))


def test_outputs_parameters_and_the_model_count() -> None:
    plain = asked(a=[1])
    some, tuned = asked(a=[1]), asked(a=[1])
    some.requested_outputs = ("Y",)
    tuned.parameters = {"beam": 2}
    assert len({key(plain), key(some), key(tuned), key(plain, b"m:2")}) == 4


def test_the_least_recently_used_is_dropped() -> None:
    cache = LocalCache(size_bytes=3 * (1024 + 100))
    keys = [key(asked(a=[number])) for number in range(4)]
    for each in keys[:3]:
        cache.keep(each, response(100))
    assert cache.find(keys[0]) is not None
    cache.keep(keys[3], response(100))
    assert [cache.find(each) is not None for each in keys] == [True, False, True, True]
    assert (cache.usage.num_entries, cache.usage.num_evictions) == (3, 1)
    assert cache.usage.size_bytes is not None
    assert cache.usage.used_bytes <= cache.usage.size_bytes


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = LocalCache(size_bytes=2000)
    assert not cache.keep(key(asked(a=[1])), response(2000))
    assert cache.usage.used_bytes == 0


def test_what_is_kept_does_not_change_with_the_backends_memory() -> None:
    memory = bytearray(b"abc")
    cache = LocalCache()
    cache.keep(b"k", InferResponse([Tensor("Y", "UINT8", (3,), memoryview(memory))]))
    memory[:] = b"xyz"
    found = cache.find(b"k")
    assert found is not None
    assert bytes(found.outputs[0].raw) == b"abc"


@pytest.mark.parametrize("batching", ["", "dynamic_batching { preserve_ordering: true }"])
async def test_a_model_runs_once_for_equal_requests(batching: str) -> None:
    client = Client(model_of(CACHED + batching, AtOnceInstance()))
    client.submit("a", rows=2)
    while client.model.num_in_flight:
        await client.model.wait_idle()
    client.submit("b", rows=2)
    assert client.answered == ["a", "b"]
    statistics = client.model.statistics
    infer = statistics.infer
    assert (statistics.inference_count, statistics.execution_count) == (2, 1)
    assert (infer.success.count, infer.queue.count, infer.compute_infer.count) == (2, 2, 1)
    assert (infer.cache_hit.count, infer.cache_miss.count) == (1, 1)
    assert client.model.num_in_flight == 0
    assert statistics.cache is not None
    assert (statistics.cache.num_hits, statistics.cache.num_misses) == (1, 1)


async def test_failures_and_cancelled_requests_are_not_kept() -> None:
    instance = HeldInstance()
    client = Client(model_of(CACHED, instance))
    client.submit("a").fail(SluiceError(ErrorCode.INTERNAL, "no"))
    instance.finish()
    client.submit("b").cancel()
    instance.finish()
    client.submit("c")
    instance.finish()
    assert instance.ids == [["a"], ["b"], ["c"]]
    assert client.model.statistics.failures[FailureReason.BACKEND] == 1


async def test_only_models_that_ask_for_it_and_whose_requests_stand_alone() -> None:
    decoupled = CACHED + "model_transaction_policy { decoupled: true }"
    for extra in ("", decoupled, CACHED + "sequence_batching { }"):
        assert model_of(extra, AtOnceInstance()).statistics.cache is None
    assert request("a").batch_size == 1


async def test_a_reshaped_output_comes_out_of_the_cache_in_the_promised_shape() -> None:
    source = ModelSource(Path("/models/echo"), 1, config_of("", RESHAPED))
    model = ScheduledModel(source, [AtOnceInstance()])
    shapes: list[tuple[int, ...]] = []
    for _ in range(2):
        tensor = Tensor.of("X", np.zeros((1, 3, 1), np.int32))
        model.submit(InferRequest({"X": tensor}), lambda answer: shapes.append(answer.outputs[0].shape))
    assert shapes == [(1, 1, 3)] * 2
    assert model.statistics.infer.cache_hit.count == 1


async def test_models_share_one_cache_and_no_responses() -> None:
    cache = LocalCache(1 << 20)
    instances = [AtOnceInstance(), AtOnceInstance()]
    first, second = (Client(cached_model(cache, each)) for each in instances)
    for client in (first, second, first):
        client.submit("a")
    assert [each.model.statistics.infer.cache_hit.count for each in (first, second)] == [1, 0]
    assert first.model.statistics.cache is second.model.statistics.cache is cache.usage
    assert (cache.usage.num_entries, cache.usage.num_hits, cache.usage.num_misses) == (2, 1, 2)


async def test_a_closed_cache_holds_nothing() -> None:
    cache = LocalCache()
    cache.keep(b"k", response())
    await cache.close()
    await cache.close()
    assert cache.find(b"k") is None
    assert (cache.usage.num_entries, cache.usage.used_bytes) == (0, 0)


def test_a_fingerprint_is_that_of_the_files_and_of_what_decides_the_answers(tmp_path: Path) -> None:
    def source(extra: str = "") -> ModelSource:
        return ModelSource(tmp_path, 1, config_of(extra))

    (tmp_path / "1" / "nested").mkdir(parents=True)
    weights = tmp_path / "1" / "nested" / "weights.bin"
    weights.write_bytes(b"old")
    first = fingerprint(source())
    assert fingerprint(source("instance_group { count: 4 } dynamic_batching { }")) == first
    assert fingerprint(source('parameters { key: "k" value { string_value: "v" } }')) != first
    weights.write_bytes(b"new")
    assert fingerprint(source()) != first
