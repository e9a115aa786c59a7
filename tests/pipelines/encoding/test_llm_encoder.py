"""Vectors of the bundled language model as a sentence-transformers model: by its files, and beside transformers."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.engine.config import EngineConfig, Task
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.encoding.encoder import QUERY_PREFIX, TO_THE_MODEL, Embeddings
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.llm.pooling import EmbeddingSettings, PoolingMode, read_embedding_settings
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.text.types import TextRequest
from tests.engine.in_process_client import InProcessEngineClient
from tests.paths import MODELS
from tests.pulled import collected

TEXTS = ["one", "A block table maps blocks.", "word " * 150, "Blocks of a finished request are kept."]
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
_CLASSES = "sentence_transformers.models."


def write_sentence_files(folder: Path, mode: str = "mean", *, normalizes: bool = True, **config: Any) -> None:
    """Make a sentence-transformers model of a checkpoint."""
    parts = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if normalizes else {})}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"{_CLASSES}{name}"}
        for at, (name, path) in enumerate(parts.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {name: key == mode for key, name in MODES.items()} | {"word_embedding_dimension": 320}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "rill" / "1", tmp_path / "model"))


@asynccontextmanager
async def encoding(folder: Path, **settings: Any) -> AsyncIterator[LlmEncoder]:
    engine = InProcessEngineClient(EngineConfig(model_path=str(folder), dtype="f32", num_blocks=64, **settings))
    await engine.start()
    try:
        text = load_text(LlmText, "embedder", folder, engine)
        await text.warm_up()
        yield LlmEncoder(text)
        assert engine.stats.num_blocks_used == 0
    finally:
        await engine.stop()


def embed(folder: Path, inputs: Any, task: Task = Task.AUTO, **wishes: Any) -> Embeddings:
    async def run() -> Embeddings:
        async with encoding(folder, task=task) as encoder:
            return await encoder.embed(inputs, lambda index: f"input[{index}]", **wishes)

    return asyncio.run(run())


def test_tokens_are_admitted_before_they_are_encoded(folder: Path) -> None:
    write_sentence_files(folder, "mean", normalizes=True)
    asked: list[int] = []

    async def admit(num_tokens: int) -> None:
        asked.append(num_tokens)
        raise SluiceError(ErrorCode.OVERLOADED, "no more")

    with pytest.raises(SluiceError, match="no more"):
        embed(folder, [[5, 6], [7]], admit=admit)
    assert asked == [3]


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: `make test-torch`")
@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_transformers_pooled_hidden_states(folder: Path, mode: str) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    write_sentence_files(folder, mode, normalizes=mode != "cls")
    found = embed(folder, TEXTS)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_tokens = 0
    for text, vector in zip(TEXTS, found.vectors, strict=True):
        token_ids = tokenizer(text)["input_ids"]
        num_tokens += len(token_ids)
        with torch.no_grad():
            hidden = model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode]
        if mode != "cls":
            expected = expected / np.linalg.norm(expected)
        assert np.abs(vector - expected).max() < 1e-4 * np.abs(expected).max()
    assert found.num_tokens == num_tokens


def test_without_files_the_last_token_counts_and_kept_prefixes_change_nothing(folder: Path) -> None:
    async def run() -> None:
        async with encoding(folder, task=Task.EMBED) as encoder:
            [first] = (await encoder.embed([TEXTS[2]], str)).vectors
            token_ids = await encoder.text.tokenizer.encode_text(TEXTS[2])
            many = (await encoder.embed([token_ids, token_ids[:100], token_ids], str)).vectors
            assert np.abs(many[[0, 2]] - first).max() < 1e-5
            assert np.abs(np.linalg.norm(many, axis=1) - 1).max() < 1e-5
            with pytest.raises(SluiceError, match="gives embeddings and no text"):
                await collected(encoder.text.generate, TextRequest(request_id="r", prompt="x"))

    asyncio.run(run())


def test_every_token_has_a_state_where_the_last_one_is_computed_alone(folder: Path) -> None:
    async def run() -> None:
        async with encoding(folder, task=Task.EMBED, max_num_batched_tokens=64) as encoder:
            for num_tokens in (1, 2, 65):
                states = await encoder.text.hidden_states(list(range(10, 10 + num_tokens)), whole=True)
                assert states.shape == (num_tokens, 320)

    asyncio.run(run())


def test_prompts_lengths_and_dimensions_are_those_of_the_files(folder: Path) -> None:
    write_sentence_files(folder, matryoshka_dimensions=[64, 128])
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Find: "}}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))

    async def run() -> None:
        async with encoding(folder) as encoder:
            asked = await encoder.embed(["pumps"], str, prefix=QUERY_PREFIX)
            plain = await encoder.embed(["Find: pumps"], str, dimensions=64)
            cut = asked.vectors[:, :64] / np.linalg.norm(asked.vectors[:, :64])
            assert np.abs(plain.vectors - cut).max() < 1e-5
            with pytest.raises(SluiceError, match="dimensions must be among 64, 128, 320 for 'embedder', got 65"):
                await encoder.embed(["x"], str, dimensions=65)
            long = "word " * 40
            with pytest.raises(SluiceError, match="input 0 has more tokens than the 16"):
                await encoder.embed([long], "input {}".format)
            truncated = await encoder.embed([long], str, truncate_to=TO_THE_MODEL)
            token_ids = (await encoder.text.tokenizer.encode_text(long))[:16]
            assert np.abs(truncated.vectors - (await encoder.embed([token_ids], str)).vectors).max() < 1e-5
            assert truncated.num_tokens == 16
            with pytest.raises(SluiceError, match=r"input\[0\]\[1\] must be a token id from 0 to 4095, got 4096"):
                await encoder.embed([[1, 4096]], "input[{}]".format)

    asyncio.run(run())


def test_a_pooling_of_newer_files_is_read(folder: Path) -> None:
    write_sentence_files(folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken", "include_prompt": True}))
    assert read_embedding_settings(folder) == EmbeddingSettings(PoolingMode.LAST)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}], "has the part Dense"),
        ("modules.json", {}, "is no list of a model's parts"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "asks for pooling by weightedmean"),
        ("1_Pooling/config.json", {**dict.fromkeys(MODES.values(), True)}, "pooling by cls, lasttoken, mean"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt out"),
    ],
)
def test_parts_that_would_change_the_vectors_are_refused(folder: Path, name: str, content: Any, message: str) -> None:
    write_sentence_files(folder)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(SluiceError, match=message):
        read_embedding_settings(folder)


def test_dense_layers_are_left_to_an_engine_that_pools(folder: Path) -> None:
    write_sentence_files(folder)
    parts = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*parts, {"path": "3_Dense", "type": f"{_CLASSES}Dense"}]))
    assert read_embedding_settings(folder, is_pooled=True).mode is PoolingMode.MEAN
    with pytest.raises(SluiceError, match="has the part Dense"):
        read_embedding_settings(folder)


def test_bidirectional_attention_is_refused(folder: Path) -> None:
    write_sentence_files(folder, use_bidirectional_attention=True)
    with pytest.raises(SluiceError, match="bidirectional attention"):
        embed(folder, ["x"])
