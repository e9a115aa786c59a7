"""All that the adapter uses of TensorRT-LLM is there, by name, type and default, in the API-stability files of both
versions; and what it uses is listed whole."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import ENGINES, FIELDS, SETTINGS
from sluice.engine.delegated.tensorrt_llm.configuration.classes import classes_at
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, field_names, load_library
from sluice.engine.delegated.tensorrt_llm.sampling import FIELDS as SAMPLING
from sluice.engine.types import SamplingParams
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2, imported
from tests.engine.delegated.tensorrt_llm.surface import (
    REQUIRED,
    STABILITY,
    STABLE_LLM,
    SURFACE,
    UNTOLD,
    Member,
    Use,
    told,
)
from tests.paths import ROOT

ADAPTER = ROOT / "engine" / "delegated" / "tensorrt_llm"
FILES = {
    "LLM": "llm",
    "RequestOutput": "request_output",
    "CompletionOutput": "completion_output",
    "GuidedDecodingParams": "guided_decoding_params",
    "QuantConfig": "quant_config",
    "SamplingParams": "sampling_params",
}
ALL_VERSIONS = pytest.mark.parametrize("flavour", list(STABLE_LLM))
NOT_IN_FILES = {"prompt_ignore_length", "logprobs_mode"}
"""Fields of SamplingParams that came after the stored files."""

SERVERS_OWN = set(
    """agent_percentage agent_types allow_request_chat_template chat_template custom_module_dirs disagg_cluster_uri
    enable_visual_gen extra_llm_api_options grpc host input_processor_workers log_level media_io_kwargs
    media_load_workers metadata_server_config_file middleware num_postprocess_workers port post_processor_hook
    reasoning_parser revision served_model_name server_role telemetry tool_parser video_pruning_rate
    visual_gen_args""".split()  # noqa: SIM905
)
"""Options of trtllm-serve that are about its own server, text or images."""


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
    api = told(FILES[owner], flavour)
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
    api = told(FILES[owner], flavour)
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
    } & set(told("llm", "1.2.1")["methods"]["generate_async"]["parameters"])
    listed = {each.name for each in SURFACE if each.owner == "LLM.generate_async"}
    assert keys == listed - {"inputs"}


# -- fields, settings and sampling parameters


@ALL_VERSIONS
def test_sampling_fields_are_all_there_with_their_defaults(flavour: str) -> None:
    parameters = told("sampling_params", flavour)["methods"]["__init__"]["parameters"]
    assert {field.name for field in SAMPLING} == parameters.keys() | NOT_IN_FILES
    for field in SAMPLING:
        if field.name in parameters:
            assert _default(parameters[field.name]) == field.default, field.name


def test_each_of_our_sampling_parameters_goes_somewhere() -> None:
    used = {name for field in SAMPLING for name in field.ours.split(", ")} - {""}
    assert used == set(SamplingParams.__struct_fields__) - {"typical_p"}, "typical_p is refused"


def test_each_option_of_trtllm_serve_is_a_setting_or_its_own() -> None:
    path = STABILITY / "references" / "trtllm_serve_cli.yaml"
    options = yaml.safe_load(path.read_text())["commands"]["serve"]["options"]
    ours = {name for name, option in options.items() if name not in SERVERS_OWN}
    assert options.keys() >= SERVERS_OWN
    for name in ours:
        for flag in (each.lstrip("-") for each in options[name]["flags"]):
            assert flag in SETTINGS, flag


@pytest.fixture
def library(flavour: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorRtLlmLibrary]:
    with imported(flavour, monkeypatch):
        yield load_library()


NOT_SETTINGS = {
    "batched_logits_processor",
    "checkpoint_loader",
    "decoding_config",
    "model",
    "mpi_session",
    "skip_tokenizer_init",
    "speculative_config.drafter",
    "speculative_config.resource_manager",
}
"""Arguments that no text can be, and those that follow from the model."""


def dotted_names(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the arguments of a class and of the configurations in it."""
    for name in sorted(field_names(cls)):
        yield f"{prefix}{name}"
        for inner in classes_at(name, cls):
            yield from dotted_names(inner, f"{prefix}{name}.")


@pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0", "1.4.0"], indirect=True)
def test_the_committed_lists_have_every_argument_of_the_classes(library: TensorRtLlmLibrary) -> None:
    version = ".".join(map(str, library.version.release[:2]))
    names = set(dotted_names(library.arguments_class(is_engine=False))) - NOT_SETTINGS
    engine_only = {name for name in names if FIELDS.get(name) == (ENGINES,)}
    assert {name for name in names - engine_only if version not in FIELDS.get(name, ())} == {
        name for name in names if name.endswith("speculative_model_dir")
    }
    # These are in the classes of both backends.
    shared = {"build_config", "scheduler_config", "speculative_config"}
    assert {name.partition(".")[0] for name in engine_only} <= shared


@ONLY_1_2
def test_the_committed_lists_have_every_argument_of_compiled_engines(library: TensorRtLlmLibrary) -> None:
    names = set(dotted_names(library.arguments_class(is_engine=True))) - NOT_SETTINGS
    lacking = {name for name in names if not {"1.2", ENGINES} & set(FIELDS.get(name, ()))}
    assert lacking == {"speculative_config.speculative_model_dir"}


def test_the_adapter_is_the_only_importer() -> None:
    """Only library.py imports TensorRT-LLM: all else gets its classes from there."""
    for path in sorted(ADAPTER.rglob("*.py")):
        source = path.read_text()
        if path.name != "library.py":
            assert "import tensorrt_llm" not in source and 'import_module("tensorrt_llm' not in source, path
