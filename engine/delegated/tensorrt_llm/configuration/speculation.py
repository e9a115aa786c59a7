"""Which speculative configuration is made, and of what."""

from sluice.engine.config import EngineConfig, Speculation
from sluice.engine.delegated.tensorrt_llm.configuration.arguments import ArgumentSet, Resolution
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import DECODING_TYPE, NO_DRAFTS
from sluice.engine.delegated.tensorrt_llm.configuration.classes import classes_at, tag_of
from sluice.engine.delegated.tensorrt_llm.library import field_names
from sluice.errors import ErrorCode, SluiceError, invalid

SPECULATION = "speculative_config"
ENGINE_TYPES = frozenset({"Lookahead", "Medusa", "Eagle"})
"""Types of speculation that compiled engines have."""
WITH_GRAMMARS = frozenset({"NGram", "Eagle", "Eagle3", "MTP"})
"""Types that guided decoding is known to work with, in every version."""

_ONLY_ENGINES = ENGINE_TYPES - {"Eagle"}
_DRAFT_LEN = f"{SPECULATION}.max_draft_len"
_LAYERS = f"{SPECULATION}.num_nextn_predict_layers"
_MODEL = f"{SPECULATION}.speculative_model"
_DEFAULT_LEN = EngineConfig(model_path="").num_speculative_tokens
_WITHOUT_LENGTH = frozenset({"Lookahead", "MTP", "SaveState"})
"""Types that find out themselves how many draft tokens there are, or draft none."""
_TYPE_OF_FIELD = {Speculation.NGRAM: "NGram", Speculation.DRAFT_MODEL: "Draft_Target"}


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
        raise arguments.refusal(given[0], f"says how to speculate, but not on what: give {DECODING_TYPE} too")
    cls = _resolve_class(resolution)
    kind = tag_of(cls)
    if kind == "MTP":
        _resolve_layers(cls, arguments)
    if kind not in _WITHOUT_LENGTH:
        arguments.add_default(_DRAFT_LEN, resolution.config.num_speculative_tokens, "num_speculative_tokens")
    if kind == "NGram":  # some versions have 0 as default, and then refuse it
        arguments.add_default(f"{SPECULATION}.max_matching_ngram_size", 4)
    # 1.2 calls the draft model's folder speculative_model_dir.
    names = [_MODEL, f"{_MODEL}_dir"]
    name, other = names if "speculative_model" in field_names(cls) else reversed(names)
    if other in arguments:
        arguments.rename(other, name)


def _resolve_class(resolution: Resolution) -> type:
    """Return the class of the type that is given, and give the type as that class has it: files may write
    Draft_Target, DraftTarget or draft_target."""
    arguments, version = resolution.arguments, resolution.library.version
    given, origin = arguments.get(DECODING_TYPE), arguments.origin(DECODING_TYPE)
    classes = {tag_of(cls): cls for cls in classes_at(SPECULATION, resolution.arguments_class)}
    plain = {tag.replace("_", "").lower(): tag for tag in classes}
    kind = plain.get(str(given).replace("_", "").lower())
    if kind is None:
        message = f"TensorRT-LLM {version} has no speculation of type {given}; it has {', '.join(sorted(classes))}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=origin)
    if resolution.is_engine and kind not in ENGINE_TYPES:
        raise invalid(origin, f"compiled engines speculate by {', '.join(sorted(ENGINE_TYPES))} only, got {kind}")
    if not resolution.is_engine and kind in _ONLY_ENGINES:
        raise invalid(origin, f"only compiled engines have speculation of type {kind}; this model runs on PyTorch")
    arguments.replace(DECODING_TYPE, kind)
    return classes[kind]


def _resolve_layers(cls: type, arguments: ArgumentSet) -> None:
    """MTP drafts a token a layer: 1.2 counts the layers, later versions the tokens as the other types do."""
    layers = getattr(cls, "model_fields", {}).get("num_nextn_predict_layers")
    name, other = (_DRAFT_LEN, _LAYERS) if layers is None or layers.default is None else (_LAYERS, _DRAFT_LEN)
    if other not in arguments:
        return
    if name not in arguments:
        arguments.rename(other, name)
    elif arguments.get(name) != arguments.get(other):
        raise arguments.refusal(other, f"must be left out beside {arguments.origin(name)}: MTP drafts a token a layer")
    arguments.drop(other)
