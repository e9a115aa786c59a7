import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.onnxruntime import options
from serving.backends.onnxruntime.options import lacks_vnni


@pytest.mark.parametrize(
    ("cpuinfo", "lacking"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
    ],
)
def test_which_processors_add_8_bit_products_in_16_bits(cpuinfo: str, lacking: bool) -> None:
    assert lacks_vnni(cpuinfo) is lacking


@pytest.mark.parametrize(("overflows", "value"), [(True, "1"), (False, "0")])
def test_auto_is_what_the_processor_needs(monkeypatch: pytest.MonkeyPatch, overflows: bool, value: str) -> None:
    monkeypatch.setattr(options, "overflows_int8", lambda: overflows)
    config = ModelConfig(name="m")
    config.parameters["session.x64quantprecision"].string_value = "auto"
    assert options.build_session_options(config).get_session_config_entry("session.x64quantprecision") == value
