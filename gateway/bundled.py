"""What comes with Sluice: its models, the pipeline among them, and its documentation."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.options.option import ConfigError

BUNDLED_MODEL = "rill"
DOCUMENTATION_COLLECTION = "sluice"
PIPELINE = ("sentence_tokenizer", "sentence_encoder", "query_encoder", "retriever", "rag_prompt", "rag_pipeline")
"""The models of the RAG pipeline, beside the language model."""


def models_folder() -> Path:
    """In an installed Sluice the models lie in this package, in a checkout beside it."""
    return _folder("models")


def documentation() -> dict[str, Path]:
    """Sluice's own documentation, as Markdown, by the names of its documents."""
    folder = _folder("docs")
    readme = next(path for path in (folder / "README.md", folder.parent / "README.md") if path.is_file())
    return {"README.md": readme} | {f"docs/{path.name}": path for path in sorted(folder.glob("*.md")) if path != readme}


@contextmanager
def pipeline_repository(llm: str, *, is_bundled: bool) -> Iterator[str]:
    """A model repository of the bundled pipeline with `llm` as its language model; gone with the context.

    `is_bundled`: it is the bundled language model, perhaps under another name. Raises ConfigError for a name that is
    taken by a model of the pipeline.
    """
    if llm in PIPELINE:
        message = f"{llm!r} is a model of the bundled pipeline; give MODEL another name with --served-model-name"
        raise ConfigError(message)
    if is_bundled and llm == BUNDLED_MODEL:
        yield str(models_folder())
        return
    with TemporaryDirectory(prefix="sluice-rag-") as folder:
        for name in PIPELINE:
            _place(models_folder() / name, Path(folder) / name, llm, is_bundled)
        yield folder


def _folder(name: str) -> Path:
    here = Path(__file__).resolve().parent
    installed = here / name
    return installed if installed.is_dir() else here.parent / name


def _place(model: Path, target: Path, llm: str, is_bundled: bool) -> None:
    """What names no language model is linked, not copied."""
    text = (model / "config.pbtxt").read_text()
    if f'"{BUNDLED_MODEL}"' not in text:
        target.symlink_to(model, target_is_directory=True)
        return
    shutil.copytree(model, target)
    (target / "config.pbtxt").write_text(_around(text, llm, is_bundled))


def _around(text: str, llm: str, is_bundled: bool) -> str:
    """The configuration for a language model of that name; for another one, without what was chosen for the bundled."""
    from google.protobuf import text_format  # slow to import, and only those who name a MODEL want it
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = text_format.Parse(text, ModelConfig())
    for step in config.ensemble_scheduling.step:
        if step.model_name == BUNDLED_MODEL:
            step.model_name = llm
    if "llm" in config.parameters:
        for chosen in [key for key in config.parameters if key != "llm" and not is_bundled]:
            del config.parameters[chosen]
        config.parameters["llm"].string_value = llm
    return str(text_format.MessageToString(config))
