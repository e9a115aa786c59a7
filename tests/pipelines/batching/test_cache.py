import numpy as np
import pytest

from engine.errors import ErrorCode, SluiceError
from pipelines.batching.cache import ResponseCache, key_of
from pipelines.inference.statistics import FailureReason
from pipelines.inference.types import InferRequest, InferResponse
from pipelines.tensors.tensor import Tensor
from tests.pipelines.batching.parts import AtOnceInstance, Client, HeldInstance, model_of, request

CACHED = "response_cache { enable: true }"


def asked(**values: object) -> InferRequest:
    return InferRequest({name: Tensor.of(name, np.array(value)) for name, value in values.items()})


def response(size: int = 1) -> InferResponse:
    return InferResponse([Tensor.of("Y", np.zeros(size, np.uint8))], {"p": 1})


def test_equal_requests_have_equal_keys() -> None:
    assert key_of(asked(a=[1, 2], b=[3])) == key_of(asked(b=[3], a=[1, 2]))
    array = np.arange(3, dtype=np.int32)
    by_bytes = InferRequest({"a": Tensor("a", "INT32", (3,), array.tobytes())})
    assert key_of(by_bytes) == key_of(InferRequest({"a": Tensor.of("a", array)}))


@pytest.mark.parametrize(
    "other",
    [asked(a=[1, 3]), asked(b=[1, 2]), asked(a=[[1, 2]]), asked(a=[1.0, 2.0]), asked(a=[1, 2], b=[1]), asked()],
)
def test_others_have_others(other: InferRequest) -> None:
    assert key_of(other) != key_of(asked(a=[1, 2]))


def test_the_outputs_asked_for_count() -> None:
    some = asked(a=[1])
    some.requested_outputs = ("Y",)
    assert key_of(some) != key_of(asked(a=[1]))


def test_the_least_recently_used_is_dropped() -> None:
    cache = ResponseCache(size_bytes=3 * (1024 + 100))
    requests = [asked(a=[number]) for number in range(4)]
    for each in requests[:3]:
        cache.keep(cache.find(each)[0], response(100))
    assert cache.find(requests[0])[1] is not None
    cache.keep(cache.find(requests[3])[0], response(100))
    assert [cache.find(each)[1] is not None for each in requests] == [True, False, True, True]
    assert (cache.usage.num_entries, cache.usage.num_evictions) == (3, 1)
    assert cache.usage.used_bytes <= cache.usage.size_bytes


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = ResponseCache(size_bytes=2000)
    assert not cache.keep(cache.find(asked(a=[1]))[0], response(2000))
    assert cache.usage.used_bytes == 0


def test_what_is_kept_does_not_change_with_the_backends_memory() -> None:
    memory = bytearray(b"abc")
    cache = ResponseCache()
    key, _ = cache.find(asked(a=[1]))
    cache.keep(key, InferResponse([Tensor("Y", "UINT8", (3,), memoryview(memory))]))
    memory[:] = b"xyz"
    found = cache.find(asked(a=[1]))[1]
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
