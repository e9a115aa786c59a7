"""The files that come with Sluice: its models, a pipeline among them, and its documentation."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.bundled import BUNDLED_MODEL, bundled_folder, models_folder
from sluice.gateway.options.option import OptionError
from sluice.run_folder import temporary_folder

DOCUMENTATION_COLLECTION = "sluice"
PIPELINE = ("sentence_tokenizer", "sentence_encoder", "query_encoder", "retriever", "rag_prompt", "rag_pipeline")
"""Models of the RAG pipeline, except the language model."""


def documentation() -> dict[str, Path]:
    """Return the paths of Sluice's own documentation, in Markdown, by document name."""
    folder = bundled_folder("docs")
    pages = {f"docs/{path.name}": path for path in sorted(folder.glob("*.md"))}
    return {"README.md": folder.parent / "README.md"} | pages


@contextmanager
def pipeline_repository(llm: str, *, is_bundled: bool) -> Iterator[str]:
    """Make a model repository of the bundled pipeline with `llm` as its language model, for the context's duration.

    `is_bundled`: `llm` is the bundled language model, perhaps under another name. Raises OptionError for the name of
    another model of the pipeline.
    """
    if llm in PIPELINE:
        message = f"{llm!r} is a model of the bundled pipeline; give MODEL another name with --served-model-name"
        raise OptionError(message)
    if is_bundled and llm == BUNDLED_MODEL:
        yield str(models_folder())
        return
    with temporary_folder("pipeline") as folder:
        for name in PIPELINE:
            _place(models_folder() / name, folder / name, llm, is_bundled)
        yield str(folder)


def _place(model: Path, target: Path, llm: str, is_bundled: bool) -> None:
    """Put `model` at `target`. One whose configuration names no language model is linked, not copied."""
    text = (model / "config.pbtxt").read_text()
    if f'"{BUNDLED_MODEL}"' not in text:
        target.symlink_to(model, target_is_directory=True)
        return
    shutil.copytree(model, target)
    (target / "config.pbtxt").write_text(_rewrite_config(text, llm, is_bundled))


def _rewrite_config(text: str, llm: str, is_bundled: bool) -> str:
    """Return the configuration for the language model `llm`, without settings chosen for the bundled one alone."""
    from google.protobuf import text_format  # slow to import, and needed only with a MODEL
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
