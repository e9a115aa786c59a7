"""Responses kept to be given again to equal requests (`response_cache`)."""

from collections import OrderedDict
from hashlib import blake2b
from time import perf_counter_ns

from pipelines.inference.statistics import CacheUsage
from pipelines.inference.types import InferRequest, InferResponse
from pipelines.tensors.tensor import Tensor

DEFAULT_SIZE_BYTES = 16 << 20
_ENTRY_BYTES = 1024
"""About what an entry takes besides its tensors."""

Key = bytes


class ResponseCache:
    """The responses of one model version, the least recently used one dropped first."""

    def __init__(self, size_bytes: int = DEFAULT_SIZE_BYTES) -> None:
        self.usage = CacheUsage(size_bytes)
        self._entries: OrderedDict[Key, tuple[int, InferResponse]] = OrderedDict()

    def find(self, request: InferRequest) -> tuple[Key, InferResponse | None]:
        """The response to an equal request, and the key to keep one under."""
        begun = perf_counter_ns()
        key = key_of(request)
        found = self._entries.get(key)
        if found is None:
            self.usage.num_misses += 1
        else:
            self._entries.move_to_end(key)
            self.usage.num_hits += 1
        self.usage.lookup_ns += perf_counter_ns() - begun
        return key, _copied(found[1]) if found is not None else None

    def keep(self, key: Key, response: InferResponse) -> bool:
        """Store a copy. False where it is there already, or larger than the whole cache."""
        usage = self.usage
        size = _ENTRY_BYTES + sum(tensor.size_bytes for tensor in response.outputs)
        if key in self._entries or size > usage.size_bytes:
            return False
        begun = perf_counter_ns()
        while usage.used_bytes + size > usage.size_bytes:
            dropped, _ = self._entries.popitem(last=False)[1]
            usage.used_bytes -= dropped
            usage.num_evictions += 1
        self._entries[key] = (size, _owned(response))
        usage.used_bytes += size
        usage.num_entries = len(self._entries)
        usage.insertion_ns += perf_counter_ns() - begun
        return True


def key_of(request: InferRequest) -> Key:
    """Equal for requests that ask for the same outputs of the same inputs, in whatever order."""
    digest = blake2b(digest_size=16)
    digest.update(repr(sorted(request.requested_outputs)).encode())
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        # Lengths and names are spelled out, so that no two different requests hash the same bytes.
        digest.update(repr((name, tensor.datatype, tensor.shape, tensor.size_bytes)).encode())
        digest.update(tensor.raw)
    return digest.digest()


def _copied(response: InferResponse) -> InferResponse:
    """For one more client: who gets it may change everything but the tensors."""
    return InferResponse(list(response.outputs), dict(response.parameters))


def _owned(response: InferResponse) -> InferResponse:
    """With tensors that stay what they are: a backend's may lie in memory that it uses again."""
    outputs = [Tensor(each.name, each.datatype, each.shape, bytes(each.raw)) for each in response.outputs]
    return InferResponse(outputs, dict(response.parameters))
