"""Checkpoints that our graphs do not support: converted by optimum-intel if it is installed, else rejected."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.loop.load import load_runner
from sluice.engine.runners.openvino import source
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.conftest import EditableCheckpoint
from tests.engine.runners.drive import Driver, Prompt

HAS_EXTRA = find_spec("optimum") is not None and find_spec("optimum.intel") is not None
needs_extra = pytest.mark.skipif(not HAS_EXTRA, reason="needs sluice[convert]: optimum-intel, and with it torch")
MAX_TOKENS = 24


def load(path: Path, cache: Path, **fields: Any) -> Any:
    config: dict[str, Any] = {"dtype": "f32", "num_blocks": 40, **fields}
    return load_runner(EngineConfig(model_path=str(path), cache_path=str(cache), **config))


def test_without_the_extra_the_error_names_it(
    checkpoint: EditableCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "can_convert", lambda: False)
    checkpoint.edit(model_type="bloom")
    with pytest.raises(SluiceError, match=r"sluice\[convert\]") as caught:
        load(checkpoint.path, tmp_path)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
    assert "model_type 'bloom'" in caught.value.message


@pytest.mark.parametrize("model_type", ["falcon_h1", "mamba2", "qwen3_next"])
def test_models_with_states_are_refused_rather_than_converted(
    model_type: str, checkpoint: EditableCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "can_convert", lambda: True)
    checkpoint.edit(model_type=model_type)
    with pytest.raises(SluiceError, match="keep a state of the whole sequence") as caught:
        load(checkpoint.path, tmp_path / "cache")
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNIMPLEMENTED, "model_path")
    assert "use --runtime vllm" in caught.value.message


@needs_extra
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_converted_once_to_what_transformers_generates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 64, "n_positions": 256}
    config = transformers.GPTJConfig(**shape, rotary_dim=8, eos_token_id=2)
    model = transformers.GPTJForCausalLM(config).eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.12)
    model.save_pretrained(tmp_path / "checkpoint")
    prompts = [torch.randint(3, 256, (1, length)) for length in (3, 40, 70)]
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "repetition_penalty": 1.3, "pad_token_id": 0}
    expected = [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in prompts]

    asked = [Prompt(ids[0].tolist(), MAX_TOKENS, 1.3, first_step) for first_step, ids in enumerate(prompts)]
    with caplog.at_level(logging.INFO):
        runner = load(tmp_path / "checkpoint", tmp_path / "cache")
        assert Driver(runner, chunk_sizes=(1, 5, 17)).generate(asked) == expected
        assert load(tmp_path / "checkpoint", tmp_path / "cache").info.model_type == "gptj"
    assert caplog.text.count("this happens once") == 1


@needs_extra
@pytest.mark.timeout(600)
def test_what_cannot_be_converted_is_told(checkpoint: EditableCheckpoint, tmp_path: Path) -> None:
    checkpoint.edit(model_type="no_such_model")
    with pytest.raises(SluiceError, match="optimum-intel cannot convert") as caught:
        load(checkpoint.path, tmp_path / "cache")
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
    assert not list((tmp_path / "cache" / "converted").iterdir())
