"""Settings in front of NVIDIA's own classes of arguments, and the names that these classes have."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.tensorrt_llm.configuration import catalogue
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import CONFIGS, ENGINES
from sluice.engine.delegated.tensorrt_llm.configuration.classes import classes_at, tag_of
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan, plan_llm
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder, read_folder
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, field_names, load_library
from sluice.errors import SluiceError
from tests.stand_ins.model_folders import make_checkpoint
from tests.tensorrt_llm_qa.loading import Checkout, Report, explain

FIELDS_FILE = Path(catalogue.__file__).with_name("fields.json")
ENDS = (2, 5, 7)
"""A model with several ends shows more."""
_OBJECTS = {
    *("model", "skip_tokenizer_init", "mpi_session", "decoding_config", "quant_config"),
    *("batched_logits_processor", "checkpoint_loader", "drafter", "resource_manager"),
}
"""Arguments that follow from others, or are objects of Python's that no file can hold."""
_DRAFTING = "speculative_config"
_DRAFTS = {"max_draft_len": 3, "speculative_model": "/drafts", "max_matching_ngram_size": 2, "file_prefix": "x"}
"""Fields that some classes of speculation cannot do without."""


class Surroundings:
    """The adapter's view of the checkout: its library, and a model's folder."""

    def __init__(self, work: Path, vocab_size: int = 4096) -> None:
        folder = work / f"checkpoint-{vocab_size}"
        if not folder.exists():
            make_checkpoint(folder, vocab_size=vocab_size, eos_token_id=list(ENDS))
        self.folder: LlmFolder = read_folder(folder)
        self.library: TensorRtLlmLibrary = load_library()
        self.arguments_class = self.library.arguments_class(is_engine=False)

    def plan(self, settings: dict[str, str]) -> LlmPlan:
        config = EngineConfig(model_path=str(self.folder.path), runtime_settings=settings)
        return plan_llm(config, self.folder, self.library)

    def make(self, arguments: Mapping[str, Any]) -> Any:
        """Make NVIDIA's own object of all arguments, as its LLM class does."""
        return self.arguments_class(**arguments)


def settings_are_taken(_: Checkout, work: Path, *__: Any) -> Report:
    """Give one setting after the other. What NVIDIA's classes take when it is given to them must be taken as the
    adapter hands it over, too."""
    report, around = Report(), Surroundings(work)
    report.add(_attempt(around, {}))
    if report.failures:  # each of the others would fail for the same reason
        return report
    for name, value, beside in _samples(around.arguments_class):
        if _takes_itself(around, name, value, beside):
            report.add(_attempt(around, {name: value} | {f"{_DRAFTING}.{key}": each for key, each in beside.items()}))
    return report


def _attempt(around: Surroundings, values: Mapping[str, Any]) -> str | None:
    """Return why NVIDIA's classes refuse a plan; None where they take it, or the adapter's own rules do not."""
    settings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    try:
        around.make(around.plan(settings).arguments)
    except SluiceError as error:
        is_theirs = f"TensorRT-LLM {around.library.version} refuses" in error.message
        return f"{settings}: {error.message}" if is_theirs or not settings else None
    except Exception as error:
        return f"{settings}: {explain(error)}"
    return None


def _samples(arguments_class: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield dotted arguments with a value that the field alone takes, and what its class needs beside it."""
    for path in ("", *sorted(CONFIGS)):
        for cls in classes_at(path, arguments_class):
            beside = {}
            if path == _DRAFTING:
                beside = {"decoding_type": tag_of(cls)} | {k: v for k, v in _DRAFTS.items() if k in field_names(cls)}
            for name, info in getattr(cls, "model_fields", {}).items():
                if name in _OBJECTS or name in beside or (path == "" and name in CONFIGS):
                    continue
                value = _sample(info)
                if value is not None:
                    yield (f"{path}.{name}" if path else name), value, beside


def _sample(info: Any) -> Any:
    annotation: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    for each in (*_candidates(info.annotation), 1, 8, 0.5, True, "auto", [1, 2]):
        with suppress(Exception):  # it may be of a type that pydantic does not know, too
            TypeAdapter(annotation).validate_python(each, strict=not isinstance(each, str))
            if each != info.default:
                return each
    return None


def _candidates(annotation: Any) -> list[Any]:
    """Return the words that a type allows."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [each.value for each in annotation if isinstance(each.value, str)]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [each for each in parts if isinstance(each, str | int)]
    return [each for part in parts for each in _candidates(part)]


def _takes_itself(around: Surroundings, name: str, value: Any, beside: Mapping[str, Any]) -> bool:
    tree: Any = value
    for part in reversed(name.split(".")):
        tree = {part: tree} | (dict(beside) if tree is value else {})
    try:
        around.make({"model": str(around.folder.path), **tree})
    except Exception:
        return False
    return True


def names_are_told(_: Checkout, work: Path, options: Any) -> Report:
    """Compare the names of all classes with the lists that the adapter has of this version."""
    report, around = Report(), Surroundings(work)
    told = json.loads((options.fields or FIELDS_FILE).read_text(encoding="utf-8"))
    place = ".".join(map(str, around.library.version.release[:2]))
    for path, lists in told.items():
        dotted = f"{path}." if path else ""
        has = {name for cls in classes_at(path, around.arguments_class) for name in field_names(cls)} - _OBJECTS
        places = {name: where.split() for where, lines in lists.items() for name in " ".join(lines).split()}
        committed = {name for name, where in places.items() if place in where}
        elsewhere = {name for name, where in places.items() if place not in where and ENGINES not in where}
        report.num_passed += len(committed & has)
        report.failures += [f"lost: {dotted}{name}" for name in sorted(committed - has)]
        report.failures += [f"new: {dotted}{name}" for name in sorted(has - places.keys())]
        report.failures += [f"told of other versions only: {dotted}{name}" for name in sorted(has & elsewhere)]
        nested = {f"{dotted}{name}" for name in has if classes_at(f"{dotted}{name}", around.arguments_class)}
        report.failures += [f"new: {name} has fields of its own" for name in sorted(nested - told.keys())]
    return report
