"""What comes with Sluice: its models, the pipeline among them, and its documentation."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

BUNDLED_MODEL = "rill"
PIPELINE = ("sentence_tokenizer", "sentence_encoder", "query_encoder", "retriever", "rag_prompt", "rag_pipeline")
"""The models of the RAG pipeline, beside the language model."""
_NAMES_THE_LLM = re.compile(rf'"{BUNDLED_MODEL}"')


def models_folder() -> Path:
    """In an installed Sluice the models lie in this package, in a checkout beside it."""
    return _folder("models")


def documentation() -> dict[str, Path]:
    """Sluice's own documentation, as Markdown, by the names of its documents."""
    folder = _folder("docs")
    readme = next(path for path in (folder / "README.md", folder.parent / "README.md") if path.is_file())
    return {"README.md": readme} | {f"docs/{path.name}": path for path in sorted(folder.glob("*.md")) if path != readme}


@contextmanager
def pipeline_repository(llm: str) -> Iterator[str]:
    """A model repository of the bundled pipeline with `llm` as its language model; gone with the context."""
    if llm == BUNDLED_MODEL:
        yield str(models_folder())
        return
    with TemporaryDirectory(prefix="sluice-rag-") as folder:
        for name in PIPELINE:
            _place(models_folder() / name, Path(folder) / name, llm)
        yield folder


def _folder(name: str) -> Path:
    here = Path(__file__).resolve().parent
    installed = here / name
    return installed if installed.is_dir() else here.parent / name


def _place(model: Path, target: Path, llm: str) -> None:
    """What names no language model is linked, not copied."""
    config = (model / "config.pbtxt").read_text()
    named = _NAMES_THE_LLM.sub(lambda _: f'"{_escaped(llm)}"', config)
    if named == config:
        target.symlink_to(model, target_is_directory=True)
        return
    shutil.copytree(model, target)
    (target / "config.pbtxt").write_text(named)


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')
