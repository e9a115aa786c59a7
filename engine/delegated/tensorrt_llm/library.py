"""The installed TensorRT-LLM: its version, and the classes that the adapter uses of it. The only importer of it."""

import inspect
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from packaging.version import InvalidVersion, Version

from sluice.engine.model_folder import ModelFormat
from sluice.errors import ErrorCode, SluiceError

MINIMUM = Version("1.2")
"""Before it scheduling parameters, cache salts and several settings have other names or do not exist."""
NEWEST = Version("1.4")
"""The newest release that the adapter knows; a later one is tried."""
LAST_WITH_ENGINES = Version("1.2")
"""The release series after which compiled engines cannot be loaded."""
FIRST_WITHOUT_ENGINES = "1.3"
_ARGUMENTS = ("TorchLlmArgs", "TrtLlmArgs")
"""The models of the arguments: of PyTorch's LLM, and of that of compiled engines."""


@dataclass(frozen=True, slots=True)
class TensorRtLlmLibrary:
    """The version that is installed, and access to its classes."""

    version: Version
    llmapi: ModuleType
    """`tensorrt_llm.llmapi`: the config classes and SamplingParams."""

    def llm_class(self, model: ModelFormat) -> Any:
        """Return the class that runs a folder of this format: PyTorch's, or `_tensorrt_engine.LLM` for compiled ones.
        Raises UNIMPLEMENTED, naming the versions that can, where this one cannot (1.3 has no engines)."""
        if model is ModelFormat.HUGGINGFACE:
            return import_module("tensorrt_llm").LLM
        return self.engine_class(f"a {model.value.replace('_', ' ')}")

    def engine_class(self, purpose: str) -> Any:
        """Return `_tensorrt_engine.LLM`. Raises SluiceError UNIMPLEMENTED, naming `purpose`, where there is none."""
        try:
            return import_module("tensorrt_llm._tensorrt_engine").LLM
        except (ImportError, AttributeError):
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"TensorRT-LLM {self.version} cannot run {purpose}: compiled engines end with "
                f"{LAST_WITH_ENGINES}.x. Serve the HuggingFace checkpoint that it was made of, which every version "
                f"runs, or install tensorrt-llm>={MINIMUM},<1.3",
            ) from None

    def arguments_class(self, *, is_engine: bool) -> Any:
        """Return the pydantic model of the LLM class' arguments. Raises SluiceError UNIMPLEMENTED without one."""
        name = _ARGUMENTS[is_engine]
        model = self.find(name)
        if model is None:
            message = f"TensorRT-LLM {self.version} has no class {name}, which tells the arguments of the LLM"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        return model

    def arguments(self, *, is_engine: bool) -> frozenset[str]:
        """Return the names of the arguments that the LLM class of this version takes."""
        model = self.find(_ARGUMENTS[is_engine])
        return field_names(model) if model is not None else frozenset()

    def find(self, name: str) -> Any | None:
        """Return the class of this name in `llmapi` or `llmapi.llm_args`; None where this version has none."""
        for module in (self.llmapi, import_module("tensorrt_llm.llmapi.llm_args")):
            if hasattr(module, name):
                return getattr(module, name)
        return None

    @property
    def inputs(self) -> ModuleType:
        """Return the module of the input processors, which make tokens of images."""
        return import_module("tensorrt_llm.inputs.registry")

    def takes_sequences(self, name: str) -> bool:
        """Return whether a field of SamplingParams takes lists of token ids beside single ones."""
        annotation = inspect.signature(self.llmapi.SamplingParams).parameters[name].annotation
        return str(annotation).lower().count("list[") > 1

    def lora_request(self, name: str, number: int, path: str) -> Any:
        """Return a request for a LoRA adapter. `number` tells adapters apart; it must be one adapter's for good."""
        request = import_module("tensorrt_llm.executor.request").LoRARequest
        return request(lora_name=name, lora_int_id=number, lora_path=path)

    def conversation(self, name: str) -> Any:
        """Return what keeps the requests of one conversation together."""
        return import_module("tensorrt_llm.conversation_params").ConversationParams(conversation_id=name)

    def logprob(self, logprob: float, rank: int | None) -> Any:
        """Return a token's log probability in the library's form."""
        return import_module("tensorrt_llm.executor.result").Logprob(logprob, rank)


def field_names(cls: Any) -> frozenset[str]:
    """Return the keyword arguments of a class: a pydantic model, a dataclass, or any whose signature names them."""
    if hasattr(cls, "model_fields"):
        return frozenset(word for name, info in cls.model_fields.items() for word in (name, *_other_names(info)))
    if is_dataclass(cls):
        return frozenset(each.name for each in fields(cls) if each.init)
    return frozenset(inspect.signature(cls).parameters)


def _other_names(info: Any) -> tuple[str, ...]:
    """Return the names under which a field is taken too: those that it had in earlier versions."""
    alias = getattr(info, "validation_alias", None)
    return tuple(each for each in getattr(alias, "choices", (alias,)) if isinstance(each, str))


def load_library() -> TensorRtLlmLibrary:
    """Import TensorRT-LLM. Raises SluiceError UNAVAILABLE with the reason where it cannot be."""
    try:
        package = import_module("tensorrt_llm")
        llmapi = import_module("tensorrt_llm.llmapi")
        version = Version(package.__version__)
    except InvalidVersion as error:
        raise _cannot_load(f"its version cannot be read: {error}") from error
    except Exception as error:  # a missing driver or CUDA library shows as many kinds of error
        raise _cannot_load(f"{type(error).__name__}: {error}") from error
    if is_before(version, str(MINIMUM)):
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"TensorRT-LLM {version} is installed, but {MINIMUM} or later is needed; "
            f"install tensorrt-llm>={MINIMUM},<1.5",
        )
    return TensorRtLlmLibrary(version, llmapi)


def _cannot_load(reason: str) -> SluiceError:
    return SluiceError(
        ErrorCode.UNAVAILABLE, f"TensorRT-LLM cannot be loaded: {reason}. `sluice doctor` says what this machine has"
    )


def float_tensor(values: npt.NDArray[np.float32]) -> Any:
    """Return a `torch.Tensor` of the same values; torch comes with TensorRT-LLM."""
    torch = import_module("torch")
    return torch.tensor(values, dtype=torch.float32)


def int_tensor(values: npt.NDArray[np.int32]) -> Any:
    """Return a `torch.Tensor` of the same values, on the GPU where there is one."""
    torch = import_module("torch")
    return torch.tensor(values, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")


# -- versions


def is_before(version: Version, other: str) -> bool:
    """Compare release numbers: 1.3.0rc5 counts as 1.3, whose features it has."""
    return version.release < Version(other).release
