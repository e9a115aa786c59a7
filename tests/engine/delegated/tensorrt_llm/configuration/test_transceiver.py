"""The transceiver's settings where prompts are handed over."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineRole
from sluice.errors import SluiceError
from tests.engine.delegated.tensorrt_llm.configuration.conftest import Plan
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2

BACKEND = "cache_transceiver_config.backend"


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {}, None),
        ({"has_prefill_replicas": True}, {}, ("DEFAULT", 30_000)),
        ({"role": EngineRole.PREFILL}, {"stall_timeout_s": "8"}, ("DEFAULT", 4000)),
        ({"has_prefill_replicas": True}, {BACKEND: "UCX"}, ("UCX", 30_000)),
        ({}, {"cache_transceiver_config": '{"backend": "NIXL", "kv_transfer_timeout_ms": 7}'}, ("NIXL", 7)),
    ],
)
def test_a_transfer_has_a_backend_and_a_limit(
    plan: Plan, fields: dict[str, Any], settings: dict[str, str], expected: tuple[str, int] | None
) -> None:
    arguments = plan(settings=settings, **fields).arguments
    config = arguments.get("cache_transceiver_config")
    assert (config and (config.backend, config.kv_transfer_timeout_ms)) == expected
    assert arguments.get("disable_overlap_scheduler") is (True if fields.get("role") else None)


@ONLY_1_2
def test_a_compiled_engine_hands_over_nothing(plan: Plan, compiled_engine: Path) -> None:
    assert "cache_transceiver_config" not in plan(compiled_engine, has_prefill_replicas=True).arguments
    with pytest.raises(SluiceError, match="role prefill is for models on the PyTorch backend"):
        plan(compiled_engine, role=EngineRole.PREFILL)
