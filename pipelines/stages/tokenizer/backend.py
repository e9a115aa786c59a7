"""Loads tokenizers."""

import asyncio
from enum import StrEnum

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from pipelines.stages.tokenizer.model import ATTENTION_MASK, INPUT_IDS, TEXT, TOKEN_TYPE_IDS, TokenizerModel
from pipelines.stages.tokenizer.text_tokenizer import TextTokenizer
from serving.backend import Backend, BackendContext
from serving.config.parameters import ParameterReader
from serving.model import Model
from serving.spec import ModelSource
from sluice.errors import SluiceError, invalid

_PARAMETERS = ("max_tokens", "add_special_tokens", "prefix")
_OUTPUTS = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS)
_ID_TYPES = (DataType.TYPE_INT64, DataType.TYPE_INT32)
_MOST_TOKENS = 1_000_000


class _Switch(StrEnum):
    TRUE = "true"
    FALSE = "false"


class TokenizerBackend(Backend):
    """A model is the `tokenizer.json` of its version's folder.

    Parameters: `max_tokens` a text, special tokens included (0, the default, for any number); `add_special_tokens`
    ("true"); `prefix`, which is put before every text.
    """

    name = "tokenizer"
    default_model_filename = "tokenizer.json"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        """Raises INVALID for tensors that a tokenizer does not have."""
        config = ModelConfig()
        config.CopyFrom(source.config)
        if not config.input:
            config.input.add(name=TEXT, data_type=DataType.TYPE_STRING, dims=[1])
        if not config.output:
            config.output.add(name=INPUT_IDS, data_type=DataType.TYPE_INT64, dims=[-1])
        _check(config)
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Raises SluiceError INVALID for wrong parameters, UNAVAILABLE where there is no tokenizer."""
        settings = ParameterReader.of_config(source.config, _PARAMETERS)
        max_tokens = settings.integer("max_tokens", 0, 0, _MOST_TOKENS)
        adds_special = settings.choice("add_special_tokens", _Switch.TRUE) is _Switch.TRUE
        tokenizer = await asyncio.to_thread(
            TextTokenizer.load, source.model_file, max_tokens, adds_special=adds_special
        )
        # Taken as it is: the space at its end is part of it.
        prefix = source.config.parameters["prefix"].string_value if "prefix" in source.config.parameters else ""
        return TokenizerModel(source.config, source.version, tokenizer, prefix)


def _check(config: ModelConfig) -> None:
    [given] = config.input if len(config.input) == 1 else [None]
    if given is None or given.name != TEXT or given.data_type != DataType.TYPE_STRING or list(given.dims) != [1]:
        raise _wrong(config, "input", f"the one input '{TEXT}' of TYPE_STRING and dims [ 1 ]")
    for output in config.output:
        if output.name not in _OUTPUTS or output.data_type not in _ID_TYPES or list(output.dims) != [-1]:
            expected = f"outputs among {', '.join(_OUTPUTS)} of TYPE_INT64 or TYPE_INT32 and dims [ -1 ]"
            raise _wrong(config, "output", f"{expected}; '{output.name}' is not")


def _wrong(config: ModelConfig, param: str, expected: str) -> SluiceError:
    return invalid(param, f"model '{config.name}' with backend 'tokenizer' must have {expected}")
