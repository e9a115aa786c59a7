"""What comes with Sluice, and the pipeline of it around another model."""

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.bundled import PIPELINE, documentation, models_folder, pipeline_repository


def config_of(repository: str, model: str) -> ModelConfig:
    return text_format.Parse((Path(repository) / model / "config.pbtxt").read_text(), ModelConfig())


def test_every_model_of_the_pipeline_is_there_with_a_version() -> None:
    for name in PIPELINE:
        assert (models_folder() / name / "1").is_dir(), name


def test_around_the_bundled_model_it_is_the_bundled_repository() -> None:
    with pipeline_repository("rill") as path:
        assert Path(path) == models_folder()


def test_around_another_model_it_names_that_one() -> None:
    with pipeline_repository('my "llama"') as path:
        pipeline = config_of(path, "rag_pipeline")
        assert pipeline.ensemble_scheduling.step[-1].model_name == 'my "llama"'
        prompt = config_of(path, "rag_prompt")
        assert prompt.parameters["llm"].string_value == 'my "llama"'
        assert set(prompt.parameters) == {"llm"}, "what was chosen for rill holds for rill"
        assert (Path(path) / "sentence_encoder" / "1" / "model.onnx").is_file()
        assert not (Path(path) / "rill").exists()
    assert not Path(path).exists()


def test_the_documentation_is_the_readme_and_the_docs() -> None:
    found = documentation()
    assert {"README.md", "docs/architecture.md"} <= found.keys()
    assert all(path.is_file() for path in found.values())
