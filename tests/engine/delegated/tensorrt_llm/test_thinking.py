"""Budgets for the reasoning that TensorRT-LLM would not keep to."""

from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from engine.delegated.tensorrt_llm.sampling import budget_refusal


@pytest.mark.parametrize(
    ("processor", "arguments", "words"),
    [
        (object(), {}, None),
        (object(), {"speculative_config": None}, None),
        (object(), {"speculative_config": object()}, "TensorRT-LLM keeps to none beside speculation"),
        (None, {}, "TensorRT-LLM 1.3.0rc5 has none, later versions of 1.3 do"),
    ],
)
def test_a_budget_needs_the_processor_and_no_speculation(
    processor: object, arguments: dict[str, Any], words: str | None
) -> None:
    library: Any = SimpleNamespace(version=Version("1.3.0rc5"), find=lambda name: processor)
    refusal = budget_refusal(arguments, library)
    expected = {} if words is None else {"thinking_token_budget": f"thinking_token_budget must be left out: {words}"}
    assert refusal == expected
