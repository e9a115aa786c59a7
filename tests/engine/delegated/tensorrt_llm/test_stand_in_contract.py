"""The stand-in's public surface is that of the API-stability files, name by name."""

import inspect
from dataclasses import MISSING, fields
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.engine.delegated.tensorrt_llm.surface import STABILITY, told

GONE = {"1.2.1": set(), "1.3.0": {"enable_tqdm", "fail_fast_on_attention_window_too_large"}}
"""Section "1.2.0rc against 1.3.0rc" of what is known of the versions."""
MADE_BY_CLASS = {"cuda_graph_config"}
"""The files show None for a default that is made anew for each object; this one is optional besides."""

VALUES = {
    "sampling_params": ("tensorrt_llm.sampling_params", "SamplingParams"),
    "guided_decoding_params": ("tensorrt_llm.sampling_params", "GuidedDecodingParams"),
    "quant_config": ("tensorrt_llm.models.modeling_utils", "QuantConfig"),
    "calib_config": ("tensorrt_llm.llmapi.llm_utils", "CalibConfig"),
    "completion_output": ("tensorrt_llm.executor.result", "CompletionOutput"),
}
BEHAVIOURS = {
    "llm": ("tensorrt_llm.llmapi.llm", "LLM"),
    "request_output": ("tensorrt_llm.llmapi.llm", "RequestOutput"),
    "completion_output": ("tensorrt_llm.executor.result", "CompletionOutput"),
    "quant_config": ("tensorrt_llm.models.modeling_utils", "QuantConfig"),
    "calib_config": ("tensorrt_llm.llmapi.llm_utils", "CalibConfig"),
    "logits_processor": ("tensorrt_llm.sampling_params", "LogitsProcessor"),
    "batched_logits_processor": ("tensorrt_llm.sampling_params", "BatchedLogitsProcessor"),
}
ANNOTATED = ("llm", "request_output")


NO_DEFAULT = "inspect._empty"


def parameters(name: str, method: str, version: str) -> dict[str, tuple[str, Any]]:
    """(annotation, default) by name."""
    return {
        key: (" ".join(value["annotation"].split()), None if value["default"] == "None" else value["default"])
        for key, value in told(name, version)["methods"].get(method, {"parameters": {}})["parameters"].items()
    }


def test_every_argument_of_the_llm_is_there_with_its_type_and_default(stand_in: ModuleType, flavour: str) -> None:
    model = import_module("tensorrt_llm.llmapi").TorchLlmArgs
    assert GONE[flavour].isdisjoint(model.model_fields)
    for name, (annotation, default) in parameters("llm", "__init__", flavour).items():
        if name in GONE[flavour] | {"kwargs"}:
            continue
        field = model.model_fields[name]
        assert field.json_schema_extra["annotation"] == annotation, name
        assert field.is_required() == (default == NO_DEFAULT), name
        if field.default_factory is not None:
            assert default is None and (annotation.startswith("tensorrt_llm.") or name in MADE_BY_CLASS), name
        elif default != NO_DEFAULT:
            assert field.default == default, name


@pytest.mark.parametrize("file", sorted(VALUES))
def test_every_field_of_a_value_is_there_with_its_type_and_default(
    stand_in: ModuleType, flavour: str, file: str
) -> None:
    module, name = VALUES[file]
    own = inspect.signature(getattr(import_module(module), name)).parameters
    made = {each.name: each.default_factory for each in fields(getattr(import_module(module), name))}
    for key, (annotation, default) in parameters(file, "__init__", flavour).items():
        assert own[key].annotation == annotation, key
        if made[key] is not MISSING:
            assert default in (None, []), key
        else:
            assert own[key].default == (inspect.Parameter.empty if default == NO_DEFAULT else default), key


@pytest.mark.parametrize("file", sorted(BEHAVIOURS))
def test_every_method_and_property_is_there_with_its_signature(stand_in: ModuleType, flavour: str, file: str) -> None:
    """Methods of the LLM and of its answers show the files' annotations too."""
    module, name = BEHAVIOURS[file]
    cls, api = getattr(import_module(module), name), told(file, flavour)
    for method in api["methods"].keys() - {"__init__"}:
        own = inspect.signature(getattr(cls, method))
        for key, (annotation, default) in parameters(file, method, flavour).items():
            expected = inspect.Parameter.empty if default == NO_DEFAULT else default
            assert own.parameters[key].default == expected, (method, key)
            assert file not in ANNOTATED or own.parameters[key].annotation == annotation, (method, key)
        assert file not in ANNOTATED or own.return_annotation == api["methods"][method]["return_annotation"]
    for attribute in api["properties"]:
        assert isinstance(inspect.getattr_static(cls, attribute), property), attribute


def test_every_configuration_has_the_fields_that_are_told_of_it(stand_in: ModuleType, flavour: str) -> None:
    llmapi = import_module("tensorrt_llm.llmapi")
    for name, said in yaml.safe_load((STABILITY.parent / "configs.yaml").read_text()).items():
        if flavour not in said.pop("flavours", [flavour]):
            assert not hasattr(llmapi, name)
            continue
        own = getattr(llmapi, name).model_fields
        for key, value in said.items():
            if key in ("base", "newest"):
                continue
            if flavour not in value.get("flavours", [flavour]):
                assert key not in own, (name, key)
            elif value.get("required"):
                assert own[key].is_required(), (name, key)
            else:
                assert own[key].get_default(call_default_factory=True) == value["default"], (name, key)


def test_what_only_one_version_has(stand_in: ModuleType, flavour: str) -> None:
    llmapi = import_module("tensorrt_llm.llmapi")
    is_old = flavour == "1.2.1"
    assert stand_in.__version__ == flavour
    assert hasattr(llmapi, "TrtLlmArgs") == is_old
    assert hasattr(stand_in.LLM, "_check_health") == (not is_old)
    assert hasattr(llmapi, "PARDDecodingConfig") == (not is_old)
    if is_old:
        assert import_module("tensorrt_llm._tensorrt_engine").LLM is not stand_in.LLM
    else:
        with pytest.raises(ModuleNotFoundError):
            import_module("tensorrt_llm._tensorrt_engine")
