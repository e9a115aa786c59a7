"""Which speculative configuration is made, and of what."""

from engine.config import EngineConfig, Speculation
from engine.delegated.tensorrt_llm.configuration.arguments import ArgumentSet, Resolution
from engine.delegated.tensorrt_llm.configuration.catalogue import DECODING_TYPE, DECODING_TYPES, NO_DRAFTS
from engine.delegated.tensorrt_llm.library import field_names, is_before, versions_in_words
from sluice.errors import ErrorCode, SluiceError, invalid

SPECULATION = "speculative_config"
ENGINE_TYPES = frozenset({"Lookahead", "Medusa", "Eagle"})
"""Types of speculation that compiled engines have."""

_ONLY_ENGINES = frozenset({"Lookahead", "Medusa"})
_SINCE = {"Eagle3": "1.3", "PARD": "1.3", "SA": "1.3"}
_DRAFT_LEN = f"{SPECULATION}.max_draft_len"
_LAYERS = f"{SPECULATION}.num_nextn_predict_layers"
_MODEL = f"{SPECULATION}.speculative_model"
_NGRAM = f"{SPECULATION}.max_matching_ngram_size"
_NGRAM_SIZE = 4
"""Some versions have 0 as default, and then refuse it."""
_DEFAULT_LEN = EngineConfig(model_path="").num_speculative_tokens
_WITHOUT_LENGTH = frozenset({"Lookahead", "MTP"})
"""Types whose other fields say how many draft tokens there are."""

_TYPES = {name.lower(): name for name in DECODING_TYPES}
_TYPE_OF_FIELD = {Speculation.NGRAM: "NGram", Speculation.DRAFT_MODEL: "DraftTarget"}


def add_speculation_fields(arguments: ArgumentSet, config: EngineConfig) -> None:
    """Add EngineConfig's fields on speculation. Raises SluiceError INVALID for a draft model that is missing."""
    if config.speculation is Speculation.OFF:
        return
    arguments.add(DECODING_TYPE, _TYPE_OF_FIELD[config.speculation], "speculation")
    if config.num_speculative_tokens != _DEFAULT_LEN:
        arguments.add(_DRAFT_LEN, config.num_speculative_tokens, "num_speculative_tokens")
    if config.speculation is Speculation.DRAFT_MODEL:
        if config.draft_model_path is None:
            raise invalid("draft_model_path", "draft_model_path must be given where speculation is draft_model")
        arguments.add(_MODEL, config.draft_model_path, "draft_model_path")


def resolve_speculation(resolution: Resolution) -> None:
    """Complete what is given to one class's fields, as this version names them. Raises INVALID or UNIMPLEMENTED."""
    arguments = resolution.arguments
    if arguments.get(DECODING_TYPE) == NO_DRAFTS:
        arguments.drop(DECODING_TYPE)
    given = arguments.within(SPECULATION)
    if not given:
        return
    if DECODING_TYPE not in arguments:
        raise arguments.refusal(given[0], "says how to speculate, but not on what: give speculative_decoding_type too")
    kind = _resolve_type(resolution)
    _complete(kind, resolution)
    # 1.2 calls the draft model's folder speculative_model_dir.
    names_of_class = field_names(resolution.library.find(DECODING_TYPES[kind]))
    name, other = _MODEL, f"{_MODEL}_dir"
    if "speculative_model" not in names_of_class:
        name, other = other, name
    if other in arguments:
        arguments.rename(other, name)


def _resolve_type(resolution: Resolution) -> str:
    """Return the name in DECODING_TYPES of what is given: files may write Draft_Target."""
    arguments, library = resolution.arguments, resolution.library
    given, origin = arguments.get(DECODING_TYPE), arguments.origin(DECODING_TYPE)
    kind = _TYPES.get(str(given).replace("_", "").lower())
    if kind is None:
        raise invalid(origin, f"{DECODING_TYPE} must be one of {', '.join(DECODING_TYPES)}, got {given!r}")
    arguments.replace(DECODING_TYPE, kind)
    if library.find(DECODING_TYPES[kind]) is None:
        since = _SINCE.get(kind, "")
        versions = versions_in_words(since) if since and is_before(library.version, since) else "other versions have it"
        message = f"TensorRT-LLM {library.version} has no speculation of type {kind}: {versions}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=origin)
    if resolution.is_engine and kind not in ENGINE_TYPES:
        raise invalid(origin, f"compiled engines speculate by {', '.join(sorted(ENGINE_TYPES))} only, got {kind}")
    if not resolution.is_engine and kind in _ONLY_ENGINES:
        raise invalid(origin, f"only compiled engines have speculation of type {kind}; this model runs on PyTorch")
    return kind


def _complete(kind: str, resolution: Resolution) -> None:
    arguments, config = resolution.arguments, resolution.config
    if kind == "MTP" and _DRAFT_LEN in arguments:
        if _LAYERS not in arguments:
            arguments.rename(_DRAFT_LEN, _LAYERS)
        elif arguments.get(_LAYERS) != arguments.get(_DRAFT_LEN):
            message = "MTP drafts a token a layer: give num_nextn_predict_layers alone"
            raise invalid(arguments.origin(_DRAFT_LEN), message)
        arguments.drop(_DRAFT_LEN)
    if kind not in _WITHOUT_LENGTH:
        arguments.add_default(_DRAFT_LEN, config.num_speculative_tokens, "num_speculative_tokens")
    if kind == "NGram":
        arguments.add_default(_NGRAM, _NGRAM_SIZE)
