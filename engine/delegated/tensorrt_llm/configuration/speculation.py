"""Which speculative configuration is made, and of what."""

from engine.config import EngineConfig, Speculation
from engine.delegated.tensorrt_llm.configuration.catalogue.speculation import (
    DECODING_TYPE,
    DECODING_TYPES,
    ENGINE_TYPES,
    NEWER_TYPES,
    NO_DRAFTS,
)
from engine.delegated.tensorrt_llm.configuration.objects import SPECULATION
from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes
from engine.delegated.tensorrt_llm.library import Library, field_names
from engine.delegated.tensorrt_llm.versions import is_before, those_with
from sluice.errors import ErrorCode, SluiceError, invalid

_DRAFT_LEN = f"{SPECULATION}.max_draft_len"
_LAYERS = f"{SPECULATION}.num_nextn_predict_layers"
_MODEL = f"{SPECULATION}.speculative_model"
_NGRAM = f"{SPECULATION}.max_matching_ngram_size"
_NGRAM_SIZE = 4
"""Some versions have 0 as default, and then refuse it."""
_USUAL_LEN = EngineConfig(model_path="").num_speculative_tokens

_ENGINES_ALONE = ENGINE_TYPES - {"Eagle"}
_WITHOUT_LENGTH = frozenset({"Lookahead", "MTP"})
"""Those whose other fields say how many draft tokens there are."""

_TYPES = {name.lower(): name for name in DECODING_TYPES}
_OF_FIELD = {Speculation.NGRAM: "NGram", Speculation.DRAFT_MODEL: "DraftTarget"}


def add_fields(wishes: Wishes, config: EngineConfig) -> None:
    """What EngineConfig says of speculation. Raises SluiceError INVALID for a draft model that is missing."""
    if config.speculation is Speculation.OFF:
        return
    wishes.add(DECODING_TYPE, _OF_FIELD[config.speculation], "speculation", Strength.ASKED)
    if config.num_speculative_tokens != _USUAL_LEN:
        wishes.add(_DRAFT_LEN, config.num_speculative_tokens, "num_speculative_tokens", Strength.ASKED)
    if config.speculation is Speculation.DRAFT_MODEL:
        if config.draft_model_path is None:
            raise invalid("draft_model_path", "draft_model_path must be given where speculation is draft_model")
        wishes.add(_MODEL, config.draft_model_path, "draft_model_path", Strength.ASKED)


def resolve(wishes: Wishes, config: EngineConfig, library: Library, *, is_engine: bool) -> None:
    """Complete what is wished for to one class' fields, under the names of this version.

    Raises SluiceError INVALID or UNIMPLEMENTED.
    """
    if wishes.get(DECODING_TYPE) == NO_DRAFTS:
        wishes.drop(DECODING_TYPE)
    given = wishes.within(SPECULATION)
    if not given:
        return
    if DECODING_TYPE not in wishes:
        origin = wishes.origin(given[0])
        raise invalid(origin, f"{origin} says how to speculate, but not on what: give speculative_decoding_type too")
    kind = _known_type(wishes)
    _check_type(kind, wishes.origin(DECODING_TYPE), library, is_engine=is_engine)
    _complete(kind, wishes, config)
    _name_model(kind, wishes, library)


def _known_type(wishes: Wishes) -> str:
    """Files may write it as Draft_Target."""
    told = wishes.get(DECODING_TYPE)
    kind = _TYPES.get(str(told).replace("_", "").lower())
    if kind is None:
        origin = wishes.origin(DECODING_TYPE)
        raise invalid(origin, f"{DECODING_TYPE} must be one of {', '.join(DECODING_TYPES)}, got {told!r}")
    wishes.replace(DECODING_TYPE, kind)
    return kind


def _check_type(kind: str, origin: str, library: Library, *, is_engine: bool) -> None:
    if library.find(DECODING_TYPES[kind]) is None:
        since = NEWER_TYPES.get(kind, "")
        versions = those_with(since, "") if since and is_before(library.version, since) else "other versions have it"
        message = f"TensorRT-LLM {library.version} has no speculation of type {kind}: {versions}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=origin)
    if is_engine and kind not in ENGINE_TYPES:
        raise invalid(origin, f"compiled engines speculate by {', '.join(sorted(ENGINE_TYPES))} only, got {kind}")
    if not is_engine and kind in _ENGINES_ALONE:
        raise invalid(origin, f"only compiled engines have speculation of type {kind}; this model runs on PyTorch")


def _complete(kind: str, wishes: Wishes, config: EngineConfig) -> None:
    if kind == "MTP" and _DRAFT_LEN in wishes:
        if _LAYERS not in wishes:
            wishes.rename(_DRAFT_LEN, _LAYERS)
        elif wishes.get(_LAYERS) != wishes.get(_DRAFT_LEN):
            raise invalid(wishes.origin(_DRAFT_LEN), "MTP drafts a token a layer: give num_nextn_predict_layers alone")
        wishes.drop(_DRAFT_LEN)
    if kind not in _WITHOUT_LENGTH:
        wishes.add(_DRAFT_LEN, config.num_speculative_tokens, "num_speculative_tokens", Strength.DEFAULT)
    if kind == "NGram":
        wishes.add(_NGRAM, _NGRAM_SIZE, "the adapter", Strength.DEFAULT)


def _name_model(kind: str, wishes: Wishes, library: Library) -> None:
    """1.2 calls the draft model's folder speculative_model_dir."""
    old = f"{_MODEL}_dir"
    name = _MODEL if "speculative_model" in field_names(library.find(DECODING_TYPES[kind])) else old
    for told in (_MODEL, old):
        if told in wishes and told != name:
            wishes.rename(told, name)
