"""Models that encode: which ones TensorRT-LLM takes, and with which arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import Speculation, Task
from sluice.engine.delegated.tensorrt_llm.configuration.encoding import Encoder, find_encoder
from sluice.errors import SluiceError
from tests.engine.delegated.tensorrt_llm.configuration.conftest import Plan
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2, ONLY_1_4
from tests.pipelines.encoding.test_llm_encoder import write_sentence_files
from tests.stand_ins.model_folders import MAX_POSITIONS, make_checkpoint

BERT: dict[str, Any] = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}


@ONLY_1_4
def test_an_embedder_is_run_by_the_class_that_pools(plan: Plan, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", with_tokenizer=True, architectures=["Qwen3ForCausalLM"])
    planned = plan(folder, task=Task.EMBED, max_num_batched_tokens=64)
    assert planned.arguments["encode_only"] is True
    assert planned.arguments["model_kwargs"] == {"architectures": ["Qwen3ForTextEmbedding"]}
    assert planned.arguments["max_num_tokens"] == planned.max_model_len == MAX_POSITIONS
    assert planned.arguments["skip_tokenizer_init"] is True and "enable_chunked_prefill" not in planned.arguments


@ONLY_1_4
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 for embed, got 2: TensorRT-LLM encodes on one"),
        ({"lora_modules": {"a": "/a"}}, "has lora_modules for generation alone"),
        ({"speculation": Speculation.NGRAM}, "has speculation for generation alone"),
    ],
)
def test_what_is_for_generation_is_refused(plan: Plan, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(SluiceError, match=words) as refused:
        plan(folder, task=Task.EMBED, **fields)
    assert refused.value.param == next(iter(fields))


@ONLY_1_2
def test_a_version_that_cannot_encode_says_which_can(plan: Plan, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(SluiceError, match=r"task cannot be used: TensorRT-LLM 1.2.1 has no .* 1.3 or 1.4 can have it"):
        plan(folder, task=Task.EMBED)


@pytest.mark.parametrize(
    ("config", "encoder"),
    [
        (BERT, Encoder(Task.SCORE, BERT["architectures"][0], 1, has_token_types=False, is_logit=True)),
        ({**BERT, "type_vocab_size": 2}, Encoder(Task.SCORE, BERT["architectures"][0], 1, True, True)),
        (
            {**BERT, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            Encoder(Task.SCORE, BERT["architectures"][0], 1),
        ),
        (
            {**BERT, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "activation Sigmoid or Identity, and .* asks for Tanh",
        ),
        ({**BERT, "num_labels": 2}, "a model of one label, and .* has 2"),
        ({**BERT, "num_labels": None}, "a model of one label, and .* has 2"),
        ({"architectures": ["LlamaForCausalLM"]}, "scores with BertForSequenceClassification, and .* is LlamaFor"),
    ],
)
def test_scores_come_from_heads_of_one_label(tmp_path: Path, config: dict[str, Any], encoder: Encoder | str) -> None:
    folder = make_checkpoint(tmp_path / "model", **config)
    if isinstance(encoder, Encoder):
        assert find_encoder(folder, Task.SCORE) == encoder
        return
    with pytest.raises(SluiceError, match=encoder):
        find_encoder(folder, Task.SCORE)


@pytest.mark.parametrize(
    ("mode", "dense", "words"),
    [("mean", False, "pools by the last token"), ("lasttoken", True, "without the part Dense")],
)
def test_parts_that_would_be_left_out_are_refused(tmp_path: Path, mode: str, dense: bool, words: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architectures=["Qwen3ForCausalLM"])
    write_sentence_files(folder, mode)
    if dense:
        modules = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(json.dumps([*modules, {"type": "a.Dense", "path": "3_Dense"}]))
    with pytest.raises(SluiceError, match=words):
        find_encoder(folder, Task.EMBED)


def test_other_decoders_embed_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match=r"embeds with Qwen3ForCausalLM, and .* is LlamaForCausalLM; give --task"):
        find_encoder(make_checkpoint(tmp_path / "model", architectures=["LlamaForCausalLM"]), Task.EMBED)


@ONLY_1_4
def test_the_mode_follows_from_the_task(plan: Plan) -> None:
    with pytest.raises(SluiceError, match="encode_only must be left out: --task embed and --task score set it"):
        plan(settings={"encode_only": "true"})
