from types import SimpleNamespace
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.text_models import choose_text_model, list_text_models, split_name
from sluice.serving.model import Model
from tests.pipelines.llm.doubles import language_model
from tests.serving.backends.ensemble.parts import HeldModel, config_of


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama", ("llama", "")),
        ("llama:french", ("llama", "french")),
        ("llama:8b", ("llama:8b", "")),
        ("llama:8b:french", ("llama:8b", "french")),
        ("llama:french:polite", ("llama", "french:polite")),
    ],
)
def test_a_model_s_own_name_may_have_the_mark_too(name: str, found: tuple[str, str]) -> None:
    assert split_name(name, ["llama", "llama:8b", "other"]) == found


@pytest.mark.parametrize("name", ["lama", "llama:", "lama:french", "", ":french", "llamas:french"])
def test_what_is_no_model_is_not_found(name: str) -> None:
    with pytest.raises(SluiceError) as caught:
        split_name(name, ["llama", "llama", "other"])
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert caught.value.message == f"model {name!r} not found; available: llama, other"


def pipeline(name: str) -> Model:
    """Answers conversations, and is no language model."""
    text = "data_type: TYPE_STRING dims: 1"
    tensors = f'input {{ name: "query" {text} }} output {{ name: "answer" {text} }}'
    return HeldModel(config_of(f'name: "{name}" {tensors}'))


def llm(name: str, version: int, *adapters: str) -> Model:
    engine = SimpleNamespace(adapters={})
    info = SimpleNamespace(adapters=adapters, embedding_size=0)
    facts = {"created": 0, "max_model_len": 64, "max_beam_width": 1}
    text: Any = SimpleNamespace(name=name, version=str(version), info=info, engine=engine, **facts)
    return language_model(text, name, version)


def test_a_pipeline_has_no_adapters() -> None:
    with pytest.raises(SluiceError, match="model 'rag' has no LoRA adapter 'french'; available: none"):
        choose_text_model(pipeline("rag"), "french")


def test_the_last_version_and_its_adapters_are_listed() -> None:
    models = [llm("llama", 1, "old"), pipeline("rag"), llm("llama", 2, "french", "polite")]
    found = list(list_text_models(models))
    assert [each.name for each in found] == ["llama", "llama:french", "llama:polite", "rag"]
    assert {each.version for each in found[:3]} == {"2"}
