"""NVIDIA's modules out of a checkout, over stubs in place of what needs a GPU, a compiled library or a model.

Every module of `tensorrt_llm` is the checkout's own, but those in STUBS and the initialisation of packages, which would
import models and kernels. A stub has any attribute that is asked of it. A module that is neither in the checkout nor
here cannot be imported: its name is a dependency that NVIDIA has added.
"""

import enum
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from packaging.version import Version
from pydantic_core import core_schema

from tests.tensorrt_llm_qa import bindings

PACKAGE = "tensorrt_llm"
STUBS = (
    *("_torch", "_utils", "auto_parallel", "bindings", "builder", "inputs", "logger", "lora_manager", "mapping"),
    *("models", "prompt_adapter_manager", "runtime", "serve", "tokenizer"),
    *("executor.ipc", "executor.postproc_worker", "executor.postprocessor_hook"),
    *("llmapi.build_cache", "llmapi.llm_utils", "llmapi.mpi_session", "llmapi.tokenizer", "llmapi.tracer"),
)
"""Modules, with all below them, that need a GPU, MPI, tokenizers or weights."""
REAL = ("_torch.pyexecutor.scheduler", "_torch.peft.lora.config")
"""Modules below a stub that are read from the checkout."""
OUTSIDE = ("cuda", "flashinfer", "mpi4py", "nvtx", "strenum", "tensorrt", "xgrammar")
"""Libraries that come with TensorRT-LLM: stubs, where they are not installed."""
MODULES = (
    *("sampling_params", "llmapi.llm_args", "llmapi.utils"),
    *(f"executor.{name}" for name in ("request", "utils", "result", "executor", "base_worker")),
)
"""Modules that the adapter depends on, beside the schedulers'."""
NUM_GPUS = 8
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
_SCHEDULER = re.compile(r"^class PyCapacityScheduler\b", re.MULTILINE)


@dataclass(slots=True)
class Report:
    """The outcome of one part: how much was tried, what failed, and what is worth knowing besides."""

    num_passed: int = 0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, failure: str | None) -> None:
        """Count one trial; `failure` is None where it passed. Equal failures are told once."""
        if failure is None:
            self.num_passed += 1
        elif failure not in self.failures:
            self.failures.append(failure)


@dataclass(frozen=True, slots=True)
class Checkout:
    """A clone of github.com/NVIDIA/TensorRT-LLM with the folders tensorrt_llm and triton_backend."""

    root: Path

    @property
    def package(self) -> Path:
        return self.root / PACKAGE

    @property
    def version(self) -> Version:
        """Raises OSError or ValueError where there is none."""
        found = _VERSION.search((self.package / "version.py").read_text(encoding="utf-8"))
        if found is None:
            raise ValueError("version.py tells no version")
        return Version(found[1])

    def scheduler_module(self) -> str:
        """Return the module of the schedulers in Python, which has been moved several times."""
        files = sorted((self.package / "_torch" / "pyexecutor").glob("**/*schedul*.py"))
        found = [each for each in files if _SCHEDULER.search(each.read_text(encoding="utf-8"))]
        paths = [".".join(each.relative_to(self.package).with_suffix("").parts) for each in found]
        return next(iter(paths), "_torch.pyexecutor.scheduler")


class Failure(Exception):
    """A module cannot be imported; the text says what is missing and who asks for it."""


def load(module: str) -> Any:
    """Import a module of the checkout by its name below `tensorrt_llm`. Raises Failure."""
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    except Exception as error:
        raise Failure(f"{PACKAGE}.{module} cannot be imported: {explain(error)}") from error


def explain(error: BaseException) -> str:
    """Return an error in one line, with the last line of NVIDIA's code that it went through."""
    marker = f"/{PACKAGE}/"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if marker in frame.filename]
    places = [frame for frame in frames if "/delegated/" not in frame.filename]
    place = f" ({places[-1].filename.rpartition(marker)[2]}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"


def install(checkout: Checkout) -> None:
    """Let `import tensorrt_llm` find the checkout's modules, in this process for good."""
    assert PACKAGE not in sys.modules, "another tensorrt_llm is imported already"
    sys.meta_path.insert(0, _Finder(checkout))
    torch: Any = importlib.import_module("torch")
    gpu = SimpleNamespace(major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, name="none")
    torch.cuda = getattr(torch, "cuda", SimpleNamespace())
    torch.cuda.get_device_properties, torch.cuda.device_count = lambda *_: gpu, lambda: NUM_GPUS


_MADE: dict[tuple[type, str], Any] = {}


class _Made(type):
    """The class of stub classes: attributes are made on demand, and are the same each time."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "model_fields":  # it is no configuration
            raise AttributeError(name)
        return _MADE.setdefault((cls, name), stub(name))


class Stub(metaclass=_Made):
    """Stands for any class, function or value. As a decorator it changes nothing."""

    __members__ = MappingProxyType[str, Any]({})

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        is_decorator = len(arguments) == 1 and isinstance(arguments[0], FunctionType | type)
        return arguments[0] if is_decorator else super().__new__(cls)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return Stub(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return core_schema.any_schema()


def stub(name: str) -> Any:
    return _Made(name, (Stub,), {})


class _StubModule(ModuleType):
    """A module with any attribute. A package's submodules come first."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        places = [Path(folder, name) for folder in self.__path__]
        full = f"{self.__name__}.{name}"
        if full in _BY_HAND or any(each.is_dir() or each.with_suffix(".py").is_file() for each in places):
            return importlib.import_module(full)
        value = stub(name)
        setattr(self, name, value)
        return value


def _llmapi(module: ModuleType) -> None:
    """`tensorrt_llm.llmapi`: the names of the modules below it, where they are there."""

    def find(name: str) -> Any:
        for place in ("sampling_params", "llmapi.llm_args", "executor.utils"):
            known = vars(importlib.import_module(f"{PACKAGE}.{place}"))
            if not name.startswith("__") and name in known:
                return known[name]
        raise AttributeError(name)

    module.__getattr__ = find  # type: ignore[method-assign]


def _having(**values: Any) -> Callable[[ModuleType], None]:
    return lambda module: vars(module).update(values)


_BY_HAND: dict[str, Callable[[ModuleType], None]] = {
    PACKAGE: _having(LLM=type("LLM", (), {})),
    f"{PACKAGE}.llmapi": _llmapi,
    f"{PACKAGE}._utils": _having(
        mpi_rank=lambda: 0,
        mpi_world_size=lambda: 1,
        mpi_disabled=lambda: False,
        _str_to_torch_dtype_dict={},
        DictConversion=type("DictConversion", (), {}),
    ),
    f"{PACKAGE}.logger": _having(Singleton=type, logger=Stub()),
    f"{PACKAGE}.bindings.executor": bindings.fill_executor,
    f"{PACKAGE}._torch.pyexecutor.llm_request": _having(LlmRequestState=bindings.LlmRequestState),
    "strenum": _having(StrEnum=enum.StrEnum),
}
_WITHOUT_MORE = frozenset({PACKAGE, f"{PACKAGE}.llmapi"})
"""Modules that are asked whether they have a name: nothing is made on demand."""


class _Finder(MetaPathFinder, Loader):
    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, below = name.partition(".")
        if top != PACKAGE:
            others = (each for each in sys.meta_path if each is not self)
            is_there = top not in OUTSIDE or any(each.find_spec(top, None) is not None for each in others)
            return None if is_there else self._spec(name, [])
        place = self._checkout.root.joinpath(*name.split("."))
        is_real = _is_below(below, REAL) or not _is_below(below, STUBS)
        if is_real and name not in _BY_HAND and place.with_suffix(".py").is_file():
            return spec_from_file_location(name, place.with_suffix(".py"))
        is_here = place.is_dir() or name in _BY_HAND or not is_real
        return self._spec(name, [str(place)]) if is_here else None

    def _spec(self, name: str, path: list[str]) -> ModuleSpec:
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = path
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.name in _WITHOUT_MORE else _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == PACKAGE:
            vars(module)["__version__"] = str(self._checkout.version)
        if fill := _BY_HAND.get(module.__name__):
            fill(module)


def _is_below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def modules_load(checkout: Checkout, *_: Any) -> Report:
    """Import each module that the adapter depends on."""
    report = Report()
    for module in (*MODULES, checkout.scheduler_module()):
        try:
            report.add(None if load(module) else "")
        except Failure as failure:
            report.add(str(failure))
    return report
