"""The bundled files, and the bundled pipeline around another model."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.bundled import models_folder
from sluice.cli.serve import bundled_pipeline
from sluice.gateway.bundled import PIPELINE, documentation, pipeline_repository
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.engine import ModelOptions
from sluice.gateway.options.option import OptionError


def config_of(repository: str, model: str) -> ModelConfig:
    return text_format.Parse((Path(repository) / model / "config.pbtxt").read_text(), ModelConfig())


def test_every_model_of_the_pipeline_is_there_with_a_version() -> None:
    for name in PIPELINE:
        assert (models_folder() / name / "1").is_dir(), name


def test_around_the_bundled_model_it_is_the_bundled_repository() -> None:
    with pipeline_repository("rill", is_bundled=True) as path:
        assert Path(path) == models_folder()


def test_around_another_model_it_names_that_one() -> None:
    with pipeline_repository('my "llama"', is_bundled=False) as path:
        pipeline = config_of(path, "rag_pipeline")
        assert pipeline.ensemble_scheduling.step[-1].model_name == 'my "llama"'
        prompt = config_of(path, "rag_prompt")
        assert prompt.parameters["llm"].string_value == 'my "llama"'
        assert set(prompt.parameters) == {"llm"}, "what was chosen for rill holds for rill"
        assert (Path(path) / "sentence_encoder" / "1" / "model.onnx").is_file()
        assert not (Path(path) / "rill").exists()
    assert not Path(path).exists()


def test_what_was_chosen_for_the_bundled_model_stays_with_it_and_with_nothing_else() -> None:
    chosen = set(config_of(str(models_folder()), "rag_prompt").parameters)
    with pipeline_repository("chat", is_bundled=True) as path:
        assert set(config_of(path, "rag_prompt").parameters) == chosen
        assert config_of(path, "rag_pipeline").ensemble_scheduling.step[-1].model_name == "chat"
    with pipeline_repository("rill", is_bundled=False) as path:
        assert set(config_of(path, "rag_prompt").parameters) == {"llm"}


@pytest.mark.parametrize("name", PIPELINE)
def test_a_language_model_cannot_have_the_name_of_a_step(name: str) -> None:
    expected = pytest.raises(OptionError, match=f"'{name}' is a model of the bundled pipeline")
    with expected, pipeline_repository(name, is_bundled=False):
        pass


def test_the_bundled_model_may_have_another_name() -> None:
    config = ServeConfig(model=ModelOptions(served_model_name="chat"))
    with bundled_pipeline(config, models_folder() / "rill" / "1") as whole:
        assert whole.rag.is_served
        (path,) = whole.repository.paths
        assert config_of(path, "rag_pipeline").ensemble_scheduling.step[-1].model_name == "chat"


def test_the_documentation_is_the_readme_and_the_docs() -> None:
    found = documentation()
    assert {"README.md", "docs/architecture.md"} <= found.keys()
    assert all(path.is_file() for path in found.values())
