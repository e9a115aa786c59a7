from gateway.grpc.unary import GRPC_CODE
from sluice.errors import ErrorCode


def test_every_code_has_a_status() -> None:
    assert GRPC_CODE.keys() == set(ErrorCode)
