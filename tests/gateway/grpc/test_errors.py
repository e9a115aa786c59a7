from engine.errors import ErrorCode
from gateway.grpc.errors import GRPC_CODE


def test_every_code_has_a_status() -> None:
    assert GRPC_CODE.keys() == set(ErrorCode)
