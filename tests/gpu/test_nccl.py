"""What one GPU can show of tensor parallel: a rank by itself, whose sums pass through NCCL."""

from pathlib import Path

import pytest


@pytest.mark.gpu("a rank of tensor parallel gives transformers' tokens, with NCCL's sums in CUDA graphs")
@pytest.mark.parametrize("name", ["qwen2", "olmo2", "gpt_oss"])
def test_a_rank_by_itself_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    from tests.engine.runners.torch.ranks import check_alone

    check_alone(name, tmp_path, "cuda")
