"""All that the adapter uses of TensorRT-LLM is there, by name, type and default, in the API-stability files of both
versions; and what it uses is listed whole."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.configuration.arguments import FIELDS
from engine.delegated.tensorrt_llm.configuration.catalogue import DECODING_TYPES, ENGINES, SETTINGS
from engine.delegated.tensorrt_llm.configuration.plan import plan_llm
from engine.delegated.tensorrt_llm.configuration.speculation import ENGINE_TYPES
from engine.delegated.tensorrt_llm.configuration.sub_configs import CLASSES, ENUMS
from engine.delegated.tensorrt_llm.folder import read_folder
from engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, field_names, is_in, load_library
from engine.delegated.tensorrt_llm.sampling import FIELDS as SAMPLING
from engine.runtime_settings import RuntimeSetting
from engine.types import SamplingParams
from sluice.errors import SluiceError
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2, imported
from tests.engine.delegated.tensorrt_llm.surface import REQUIRED, SURFACE, UNTOLD, Member, Use
from tests.paths import ROOT
from tests.stand_ins.model_folders import make_checkpoint

ADAPTER = ROOT / "engine" / "delegated" / "tensorrt_llm"
STABILITY = ROOT / "tests" / "data" / "tensorrt_llm" / "api_stability"
FILES = {
    "LLM": "llm",
    "RequestOutput": "request_output",
    "CompletionOutput": "completion_output",
    "GuidedDecodingParams": "guided_decoding_params",
    "QuantConfig": "quant_config",
    "SamplingParams": "sampling_params",
}
STABLE_LLM = {"1.2.1": "llm.e00a1866.yaml", "1.3.0": "llm.yaml"}
ALL_VERSIONS = pytest.mark.parametrize("flavour", list(STABLE_LLM))
NOT_IN_FILES = {"prompt_ignore_length", "logprobs_mode"}
"""Fields of SamplingParams that came after the stored files."""

ROWS = [row for rows in SETTINGS.groups.values() for row in rows if row.target]
SERVERS_OWN = set(
    """agent_percentage agent_types allow_request_chat_template chat_template custom_module_dirs disagg_cluster_uri
    enable_visual_gen extra_llm_api_options grpc host input_processor_workers log_level media_io_kwargs
    media_load_workers metadata_server_config_file middleware num_postprocess_workers port post_processor_hook
    reasoning_parser revision served_model_name server_role telemetry tool_parser video_pruning_rate
    visual_gen_args""".split()  # noqa: SIM905
)
"""Options of trtllm-serve that are about its own server, text or images."""


def told(owner: str, flavour: str) -> dict[str, Any]:
    """Return both files of a class as one."""
    name = FILES[owner]
    stable = STABLE_LLM[flavour] if name == "llm" else f"{name}.yaml"
    whole: dict[str, Any] = {"methods": {}, "properties": {}}
    for path in (STABILITY / "references_committed" / stable, STABILITY / "references" / f"{name}.yaml"):
        if not path.is_file():
            continue
        part = yaml.safe_load(path.read_text())
        whole["properties"].update(part["properties"])
        for method, said in part["methods"].items():
            there = whole["methods"].setdefault(method, {"parameters": {}})
            there["return_annotation"] = said["return_annotation"]
            there["parameters"].update(said["parameters"])
    return whole


def alternatives(annotation: object) -> set[str]:
    """Return the types of which an annotation takes any; None is "None"."""
    return _alternatives(ast.parse(" ".join(str(annotation).split()), mode="eval").body)


def _alternatives(node: ast.expr) -> set[str]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _alternatives(left) | _alternatives(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _alternatives(inner) | {"None"}
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return set().union(*map(_alternatives, members))
        case ast.Name(id="NoneType"):
            return {"None"}
    return {ast.unparse(node)}


# -- what the list says is so


@ALL_VERSIONS
@pytest.mark.parametrize("member", SURFACE, ids=lambda member: f"{member.owner}.{member.name}")
def test_a_member_is_as_the_files_tell(flavour: str, member: Member) -> None:
    owner, _, method = member.owner.partition(".")
    api = told(owner, flavour)
    if member.use is Use.CALLS:
        assert alternatives(api["methods"][member.name]["return_annotation"]) == alternatives(member.type)
        return
    parameters = api["methods"][method or "__init__"]["parameters"]
    said = api["properties"].get(member.name) or parameters[member.name]
    types = alternatives(said["annotation"])
    if member.use is Use.GIVES:
        assert member.type in types
    else:
        assert types == alternatives(member.type)
    if member.name in parameters:
        assert _default(said) == member.default


def _default(said: Mapping[str, Any]) -> object:
    default = said.get("default")
    return {"inspect._empty": REQUIRED, "None": None}.get(str(default), default)


# -- the list is whole


def syntax_trees() -> Iterator[ast.AST]:
    for path in sorted(ADAPTER.rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


@pytest.fixture(scope="module")
def used_names() -> set[str]:
    """Attributes that the adapter's code names, and texts that may be names."""
    names = set()
    for node in syntax_trees():
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(node.value.split("."))
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
    return names


def test_nothing_of_the_list_is_unused(used_names: set[str]) -> None:
    unused = [f"{each.owner}.{each.name}" for each in SURFACE if each.name not in used_names | {"inputs"}]
    assert not unused
    assert {name.partition(".")[2] for name in UNTOLD} <= used_names


OURS_TOO = {"generate", "prompt", "request_id", "prompt_token_ids", "length", "text", "index", "result"}
"""Names that are TensorRT-LLM's and ours, where the code means ours."""


@pytest.mark.parametrize("owner", ["LLM", "RequestOutput", "CompletionOutput"])
@ALL_VERSIONS
def test_all_that_is_used_is_on_the_list(owner: str, flavour: str) -> None:
    """Every attribute in the adapter's code that a class of TensorRT-LLM has is listed for it, or known to be ours."""
    api = told(owner, flavour)
    theirs = {*api["properties"], *api["methods"]} - {"__init__"}
    if owner == "CompletionOutput":
        theirs |= {*api["methods"]["__init__"]["parameters"]}
    attributes = {node.attr for node in syntax_trees() if isinstance(node, ast.Attribute)}
    listed = {each.name for each in SURFACE} | {field.name for field in SAMPLING}
    assert attributes & theirs <= listed | OURS_TOO


def test_generate_async_is_given_nothing_else() -> None:
    source = ast.parse((ADAPTER / "llm.py").read_text())
    keys = {
        node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    } & set(told("LLM", "1.2.1")["methods"]["generate_async"]["parameters"])
    listed = {each.name for each in SURFACE if each.owner == "LLM.generate_async"}
    assert keys == listed - {"inputs"}


# -- fields, settings and sampling parameters


@ALL_VERSIONS
def test_sampling_fields_are_all_there_with_their_defaults(flavour: str) -> None:
    parameters = told("SamplingParams", flavour)["methods"]["__init__"]["parameters"]
    assert {field.name for field in SAMPLING} == parameters.keys() | NOT_IN_FILES
    for field in SAMPLING:
        if field.name in parameters:
            assert _default(parameters[field.name]) == field.default, field.name


def test_each_of_our_sampling_parameters_goes_somewhere() -> None:
    used = {name for field in SAMPLING for name in field.ours.split(", ")} - {""}
    assert used == set(SamplingParams.__struct_fields__) - {"typical_p"}, "typical_p is refused"


def test_each_field_of_our_configuration_is_in_the_table() -> None:
    assert [field.name for field in FIELDS] == list(EngineConfig.__struct_fields__)


def test_each_option_of_trtllm_serve_is_a_setting_or_its_own() -> None:
    path = STABILITY / "references" / "trtllm_serve_cli.yaml"
    options = yaml.safe_load(path.read_text())["commands"]["serve"]["options"]
    flags = {flag.lstrip("-") for option in options.values() for flag in option["flags"]}
    ours = {name for name, option in options.items() if name not in SERVERS_OWN}
    assert options.keys() >= SERVERS_OWN
    for name in ours:
        for flag in (each.lstrip("-") for each in options[name]["flags"]):
            assert flag in SETTINGS, flag
    assert not {name for name in SETTINGS if name in flags and name in SERVERS_OWN}


@pytest.fixture
def library(flavour: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorRtLlmLibrary]:
    with imported(flavour, monkeypatch):
        yield load_library()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", with_tokenizer=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_setting_is_taken_by_the_versions_that_have_it(
    library: TensorRtLlmLibrary, model: Path, row: RuntimeSetting
) -> None:
    """The classes of the stand-in are made from the files, and check names and types strictly."""
    text = str(model) if row.target == "tokenizer" else sample(row)
    settings = {row.name: text, **companions(row, library)}
    config = EngineConfig(model_path=str(model), runtime_settings=settings)
    has_it = is_in(library.version, row.since, row.until) and has_backend(settings, library)
    if not has_it:
        with pytest.raises(SluiceError, match=r"cannot be used|no speculation of type|end with 1\.2\.x"):
            plan_llm(config, read_folder(model), library)
        return
    plan = plan_llm(config, read_folder(model), library)
    checked = library.find("TrtLlmArgs" if settings.get("backend") == "tensorrt" else "TorchLlmArgs")
    assert checked is not None
    made = checked(**plan.arguments)
    if row.target not in ("backend", "speculative_config.decoding_type"):
        assert plain(held(made, row.target)) == expected(row, settings)


def sample(row: RuntimeSetting) -> str:
    """Return a text that the row reads."""
    for text in ("64", "1", "true", "8,16", "{0}, {0, 0}", "{}", "FP8", "auto"):
        try:
            row.parse(text)
        except ValueError as error:
            words = str(error).rpartition("one of ")[2] if "one of " in str(error) else ""
            if words:
                return words.split(", ")[0]
        else:
            return "FP8" if row.target in ENUMS else text
    raise AssertionError(f"no text for {row.name}")


def companions(row: RuntimeSetting, library: TensorRtLlmLibrary) -> dict[str, str]:
    """Return the settings that a setting needs beside it."""
    settings = {"backend": "tensorrt"} if row.backend == ENGINES and row.target != "backend" else {}
    if row.target == "tokenizer":
        settings["guided_decoding_backend"] = "xgrammar"
    if not row.target.startswith("speculative_config.") or row.target.endswith("decoding_type"):
        return settings | ({"backend": "tensorrt"} if sample(row) in ("medusa", "lookahead") else {})
    kinds = [kind for kind, name in DECODING_TYPES.items() if has_field(name, row.target, library)]
    kind = next((each for each in kinds if (each in ENGINE_TYPES) == (row.backend == ENGINES)), kinds[0])
    settings["speculative_decoding_type"] = kind
    if kind in ("Eagle", "DraftTarget") and row.name != "speculative_model":
        settings["speculative_model"] = "/draft"
    return settings


def has_field(class_name: str, target: str, library: TensorRtLlmLibrary) -> bool:
    cls = library.find(class_name)
    field = target.rpartition(".")[2]
    return cls is not None and bool({field, f"{field}_dir"} & field_names(cls))


def has_backend(settings: Mapping[str, str], library: TensorRtLlmLibrary) -> bool:
    has_engines = bool(library.arguments(is_engine=True))
    return has_engines or settings.get("backend") != "tensorrt"


def held(made: Any, target: str) -> Any:
    for part in target.split("."):
        if part == "speculative_model" and not hasattr(made, part):
            part = "speculative_model_dir"
        made = getattr(made, part)
    return made


def expected(row: RuntimeSetting, settings: Mapping[str, str]) -> Any:
    value = row.parse(settings[row.name])
    return plain(None if value == {} and row.target in CLASSES else value)


def plain(value: Any) -> Any:
    """Return enumerations by name, words in small letters, objects without given fields as None."""
    if isinstance(value, set):
        return sorted(value)
    if hasattr(value, "model_fields_set"):
        return None
    word = getattr(value, "name", value)
    return word.lower() if isinstance(word, str) else word


@ONLY_1_2
def test_policies_are_named_as_the_library_names_them(library: TensorRtLlmLibrary) -> None:
    for target, name in ENUMS.items():
        enum = library.find(name)
        rows = [row for row in ROWS if row.target == target]
        assert enum is not None and rows
        for row in rows:
            try:
                row.parse("?")
            except ValueError as error:
                words = str(error).partition("one of ")[2].split(", ")
                assert {row.parse(word) for word in words} == set(enum.__members__), row.name


def test_the_adapter_is_the_only_importer() -> None:
    """Only library.py imports TensorRT-LLM: all else gets its classes from there."""
    for path in sorted(ADAPTER.rglob("*.py")):
        source = path.read_text()
        if path.name != "library.py":
            assert "import tensorrt_llm" not in source and 'import_module("tensorrt_llm' not in source, path
