"""The installed library, and the classes that run each kind of folder."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from packaging.version import Version

from sluice.engine.delegated.tensorrt_llm.library import field_names, is_before, load_library
from sluice.engine.model_folder import ModelFormat
from sluice.errors import ErrorCode, SluiceError

COMPILED = (ModelFormat.TENSORRT_LLM_CHECKPOINT, ModelFormat.TENSORRT_LLM_ENGINE)


def test_it_is_loaded_with_its_version(stand_in: ModuleType, flavour: str) -> None:
    library = load_library()
    assert library.version == Version(flavour)
    assert library.llmapi is stand_in.llmapi
    assert library.llm_class(ModelFormat.HUGGINGFACE) is stand_in.LLM


@pytest.mark.parametrize("folder", COMPILED)
def test_what_is_compiled_has_a_class_of_its_own_before_1_3(
    stand_in: ModuleType, flavour: str, folder: ModelFormat
) -> None:
    library = load_library()
    if flavour == "1.2.1":
        assert library.llm_class(folder) is not stand_in.LLM
        assert "extended_runtime_perf_knob_config" in library.arguments(is_engine=True)
        return
    with pytest.raises(SluiceError, match=r"1\.3\.0 cannot run .* end with 1\.2\.x.*HuggingFace checkpoint") as refused:
        library.llm_class(folder)
    assert refused.value.code is ErrorCode.UNIMPLEMENTED
    assert library.arguments(is_engine=True) == frozenset()


def test_arguments_are_those_of_the_version(stand_in: ModuleType, flavour: str) -> None:
    library = load_library()
    arguments = library.arguments(is_engine=False)
    assert {"model", "kv_cache_config", "cuda_graph_config", "enable_iter_perf_stats"} <= arguments
    assert ("otlp_traces_endpoint" in arguments) is (flavour == "1.3.0")
    scheduler = library.find("SchedulerConfig")
    assert ("waiting_queue_policy" in field_names(scheduler)) is (flavour == "1.3.0")
    assert library.find("NoSuchConfig") is None


def test_an_adapter_is_asked_for_by_name_number_and_folder(stand_in: ModuleType, tmp_path: object) -> None:
    asked = load_library().lora_request("sql", 3, str(tmp_path))
    assert (asked.name, asked.adapter_id, asked.path) == ("sql", 3, str(tmp_path))


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0rc5"])
def test_an_old_version_is_refused_by_name(
    import_stand_in: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(import_stand_in(), "__version__", version)
    with pytest.raises(SluiceError, match=rf"TensorRT-LLM {version} is installed, but 1\.2 or later") as refused:
        load_library()
    assert refused.value.code is ErrorCode.UNAVAILABLE


def test_a_pre_release_counts_as_its_release(stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "__version__", "1.3.0rc7")
    assert not is_before(load_library().version, "1.3")


def test_what_cannot_be_imported_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(SluiceError, match=r"TensorRT-LLM cannot be loaded: .*sluice doctor") as refused:
        load_library()
    assert refused.value.code is ErrorCode.UNAVAILABLE


def test_a_version_that_cannot_be_read_is_unavailable(stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "__version__", "unknown")
    with pytest.raises(SluiceError, match="its version cannot be read"):
        load_library()


def test_versions_are_compared_by_their_release() -> None:
    assert is_before(Version("1.2.1"), "1.3") and not is_before(Version("1.3.0rc1"), "1.3")
