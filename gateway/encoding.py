"""The models of the repository that turn texts into vectors, scores or labels, rather than into text."""

from collections.abc import Callable, Iterable

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.llm.model import LlmModel, embedder_of
from sluice.pipelines.rag.classifier import TextClassifier, is_classifier
from sluice.pipelines.rag.encoder import TextEncoder
from sluice.pipelines.rag.encoder import is_encoder as has_vectors
from sluice.pipelines.rag.llm_encoder import LlmEncoder
from sluice.pipelines.rag.retrieval.reranker import EncoderReranker, LlmReranker, ModelReranker, RerankerFinder
from sluice.pipelines.text.model import text_model_of
from sluice.serving.model import Model
from sluice.serving.repository.repository import ModelRepository


class EncodingModels:
    """Finds encoders, rerankers and classifiers for the sender of a request. Lives on the event loop's thread."""

    def __init__(
        self, repository: ModelRepository, find: Callable[[str], Model], visible: Callable[[], list[Model]]
    ) -> None:
        """`find` returns a loaded model and raises NOT_FOUND; `visible` returns those that the sender may use."""
        self.repository = repository
        self._find = find
        self._visible = visible
        self._rerankers = RerankerFinder(repository)

    def encoders(self) -> list[TextEncoder | LlmEncoder]:
        """Return every model that has embeddings and no text, by name."""
        found = {model.name: model for model in self._visible() if self.is_encoder(model)}
        return [self.open(found[name]) for name in sorted(found)]

    def has_embeddings(self, name: str) -> bool:
        """Return whether `encoder` finds the model `name`."""
        try:
            return self.is_encoder(self._find(name))
        except SluiceError:
            return False

    def is_encoder(self, model: Model) -> bool:
        """Return whether a model has embeddings and no text."""
        if isinstance(model, LlmModel):
            return embedder_of(model) is not None
        return text_model_of(model) is None and has_vectors(model, self.repository)

    def open(self, model: Model) -> TextEncoder | LlmEncoder:
        """Return the encoder over a model that `is_encoder`."""
        text = embedder_of(model)
        return TextEncoder(self.repository, model.name) if text is None else LlmEncoder(text)

    def encoder(self, name: str) -> TextEncoder | LlmEncoder:
        """Return the embedding model `name`.

        Raises NOT_FOUND in OpenAI's words, INVALID for a model without embeddings, and UNAVAILABLE while the model
        cannot serve. The errors list the models that have embeddings.
        """
        if not self.has_embeddings(name):
            names = [each.name for each in self.encoders()]
            raise self._unusable(name, "has no embeddings; models with embeddings", names)
        return self.open(self._find(name))

    def rerankers(self) -> list[ModelReranker]:
        """Return every model that scores passages by itself, by name."""
        names = {each.name for each in self._visible() if self._rerankers.is_reranker(each)}
        return [ModelReranker(self.repository, name) for name in sorted(names)]

    async def reranker(self, name: str) -> ModelReranker | EncoderReranker | LlmReranker:
        """Return the reranker `name`, or one that compares the vectors of the encoder `name`. Raises as `encoder`."""
        if self.has_embeddings(name):
            return EncoderReranker(self.encoder(name))
        names = [each.name for each in self.rerankers()]
        if name not in names:
            usable = [*(each.name for each in self.encoders()), *names]
            raise self._unusable(name, "does not score texts; models that do", usable)
        return await self._rerankers.find(self._find(name))

    def classifiers(self) -> list[TextClassifier]:
        """Return every model that classifies texts, by name."""
        names = {each.name for each in self._visible() if is_classifier(each, self.repository)}
        return [TextClassifier(self.repository, name) for name in sorted(names)]

    def classifier(self, name: str) -> TextClassifier:
        """Return the classifier `name`. Raises as `encoder`."""
        found = self.classifiers()
        names = [each.name for each in found]
        if name not in names:
            raise self._unusable(name, "has no output with labels; models that classify texts", names)
        return found[names.index(name)]

    def _unusable(self, name: str, fault: str, usable: Iterable[str]) -> SluiceError:
        """Return why the model `name` cannot be used: its absence, or else its `fault`, which ends in the `usable`."""
        available = ", ".join(usable) or "none"
        try:
            self._find(name)
        except SluiceError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                return error
            return SluiceError(error.code, f"model {name!r} not found; available: {available}", param="model")
        return invalid("model", f"model {name!r} {fault}: {available}")
