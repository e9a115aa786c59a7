import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize
from tokenizers import Tokenizer

from benchmarks.models import M, S, model_s, tensor_shapes
from tests.paths import RILL_TOKENIZER


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_s(tmp_path_factory.mktemp("models"), RILL_TOKENIZER)


def test_weights_have_the_size_and_precision_that_the_comparison_states(checkpoint: Path) -> None:
    tensors = dict(deserialize((checkpoint / "model.safetensors").read_bytes()))  # type: ignore[no-untyped-call]
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert sum(np.prod(tensor["shape"]) for tensor in tensors.values()) == 7_901_440
    embedding = np.frombuffer(tensors["model.embed_tokens.weight"]["data"], np.uint16).astype(np.uint32) << 16
    assert embedding.view(np.float32).std() == pytest.approx(0.02, rel=0.01)


def test_every_id_decodes_to_text_of_its_own(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == S["vocab_size"]
    added = [tokenizer.decode([token_id]) for token_id in range(4096, S["vocab_size"])]
    assert len(set(added)) == S["vocab_size"] - 4096
    assert all(word.startswith(" ") for word in added)


def test_a_finished_checkpoint_is_kept(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").stat().st_mtime_ns
    assert model_s(checkpoint.parent, RILL_TOKENIZER) == checkpoint
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((checkpoint / "config.json").read_text()) == S


def test_m_has_the_size_that_the_comparison_states() -> None:
    assert sum(np.prod(shape) for _, shape in tensor_shapes(M)) == 473_235_456
