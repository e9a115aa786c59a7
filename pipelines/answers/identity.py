"""What determines a model's answers besides the request: its name, its files and its settings, as one text."""

from uuid import uuid4
from weakref import WeakKeyDictionary

from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.remote.embedding import EncoderModel
from sluice.pipelines.remote.model import RemoteLlmModel
from sluice.pipelines.text.model import TextModel, fingerprint_of
from sluice.pipelines.text.tensor_model import TensorText
from sluice.serving.model import Model

_own: WeakKeyDictionary[Model, str] = WeakKeyDictionary()
"""Identities of loaded models of which only this process knows that they stay the same."""


def text_identity(model: TextModel) -> str | None:
    """Return what determines the answers of a text model; None for one whose answers depend on more, such as documents
    that a pipeline retrieves."""
    if isinstance(model, LlmText):
        return f"{model.fingerprint}:{model.files}"
    if isinstance(model, AdapterText):
        mark = model.base.engine.adapter_marks.get(model.adapter)
        return None if mark is None else f"{model.fingerprint}:{model.base.files}:{model.root}:{mark}"
    if isinstance(model, TensorText) and not model.takes_parameters:
        return _model_identity(model.model)
    return None


def encoder_identity(encoder: TextEncoder | LlmEncoder) -> str:
    """Return what determines the vectors of an encoder. Raises UNAVAILABLE for one that does not serve."""
    if isinstance(encoder, LlmEncoder):
        return f"{encoder.text.fingerprint}:{encoder.text.files}"
    return ":".join(map(_model_identity, encoder.models_used()))


def _model_identity(model: Model) -> str:
    if isinstance(model, RemoteLlmModel | EncoderModel):  # its configuration says all, and gateways may share it
        return fingerprint_of(model.name, model.version, model.config.SerializeToString(deterministic=True))
    found = _own.get(model)
    if found is None:
        found = _own[model] = f"{model.name}:{model.version}:{uuid4().hex}"
    return found
