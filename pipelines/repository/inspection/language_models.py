"""Which runtime would serve a language model, and what it would obey. Reads the file system, but no model file."""

from engine.config import EngineConfig
from engine.errors import SluiceError
from pipelines.backends.base import ModelSource
from pipelines.repository.candidate import Candidate
from pipelines.repository.completion import LLM_BACKENDS
from pipelines.repository.findings import refusal
from pipelines.repository.inspection.report import RuntimeReport


def runtime_report(candidate: Candidate) -> RuntimeReport | None:
    """Of its newest version; None for other models, and for one that would not load."""
    if candidate.config.backend not in LLM_BACKENDS or not candidate.versions:
        return None
    try:
        return check_language_model(ModelSource(candidate.folder.path, candidate.versions[-1], candidate.config))
    except SluiceError:
        return None  # it is among the errors


def check_language_model(source: ModelSource) -> RuntimeReport:
    """Raises SluiceError with the reason that it would not load for; a parameter is told by its place."""
    # The text side of LLMs takes its time to import.
    from pipelines.backends.llm.setup import set_up

    try:
        setup = set_up(source, lambda path: EngineConfig(model_path=path))
    except SluiceError as error:
        if error.param is None or error.param not in source.config.parameters:
            raise
        raise refusal(error.message, f'parameters["{error.param}"]') from None
    named = {note.partition(":")[0] for note in setup.notes}
    obeyed = tuple(sorted(setup.texts.keys() - named))
    return RuntimeReport(setup.choice.runtime.value, setup.choice.reason, obeyed, tuple(setup.notes))
