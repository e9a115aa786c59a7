import pytest

from sluice.engine.config import EngineConfig, Listening
from sluice.errors import ErrorCode, SluiceError


def test_decode_must_fit_into_a_step() -> None:
    EngineConfig(model_path="", max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(SluiceError, match=r"at least max_num_seqs \(8\).*got 7") as caught:
        EngineConfig(model_path="", max_num_seqs=8, max_num_batched_tokens=7)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == "max_num_batched_tokens"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoints": ["tcp://0.0.0.0:1"]}, "tcp://0.0.0.0:1 is open to other machines, which needs a CURVE key"),
        ({"endpoints": ["tcp://*:1"]}, "is open to other machines"),
        ({"endpoints": ["ipc:///x"]}, "an endpoint must be tcp://HOST:PORT, such as .*, got 'ipc:///x'"),
        ({"endpoints": ["tcp://localhost:70000"]}, "got 'tcp://localhost:70000'"),
        ({"endpoints": ["tcp://127.0.0.1:0"], "curve_key": "k"}, "need each other"),
        ({"endpoints": [], "curve_key": "k", "allowed_clients": "f", "is_insecure": True}, "not both"),
    ],
)
def test_endpoints_without_keys_are_of_this_machine(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SluiceError, match=message):
        Listening(**fields)  # type: ignore[arg-type]


def test_insecure_endpoints_are_said_in_so_many_words() -> None:
    assert Listening(endpoints=["tcp://0.0.0.0:1", "tcp://[::1]:2"], is_insecure=True).curve_key is None
