"""The blocks that TensorRT-LLM reserves."""

import pytest

from engine.delegated.tensorrt_llm.llm import blocks_to_completion


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "beams", "blocks"),
    [
        (1, 1, 1, 1),
        (31, 1, 1, 1),
        (32, 1, 1, 2),  # the last token counts, though it is never fed back
        (32, 32, 1, 2),
        (33, 32, 1, 3),
        (70, 30, 1, 4),
        (70, 30, 3, 2 + 2 * 3),  # whole blocks of the prompt are shared
        (64, 32, 4, 2 + 4),
        (5, 20, 4, 4),
    ],
)
def test_the_reservation_is_the_references(prompt: int, max_tokens: int, beams: int, blocks: int) -> None:
    assert blocks_to_completion(prompt, max_tokens, beams, 32) == blocks
