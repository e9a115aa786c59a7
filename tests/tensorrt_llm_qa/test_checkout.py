"""The adapter over a checkout of TensorRT-LLM that the variable TENSORRT_LLM_CHECKOUT names."""

import os
from pathlib import Path

import pytest

from tests.tensorrt_llm_qa.__main__ import PARTS, main

CHECKOUT = os.environ.get("TENSORRT_LLM_CHECKOUT", "")  # noqa: TID251 - a test's own variable
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="TENSORRT_LLM_CHECKOUT names no clone of github.com/NVIDIA/TensorRT-LLM"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_the_part_passes(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CHECKOUT, part, "--work", str(tmp_path)]) == 0, capsys.readouterr().out
