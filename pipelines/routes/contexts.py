"""Which targets a request is too long for."""

import msgspec

from sluice.errors import SluiceError, too_long
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.stream import sent_prompt
from sluice.pipelines.text.types import EncodedPrompt, TextRequest


class ContextGuard:
    """Keeps one request from targets with a context that is too short for it. Counts tokens where a target with a
    larger context, or an unknown one, could take what another cannot."""

    def __init__(self, lengths: list[int | None]) -> None:
        """`lengths` are the contexts of the targets, in tokens; None where one is not known."""
        self._longest = max((each for each in lengths if each is not None), default=0)
        self._has_unknown = None in lengths
        self._too_short = 0
        """The longest context that was too short."""

    def may_take(self, model: TextModel) -> bool:
        """Whether the request may fit into the model's context, as far as others have shown."""
        return model.max_model_len is None or model.max_model_len > self._too_short

    def note(self, model: TextModel, error: SluiceError) -> None:
        """Note that a model refused the request, maybe for its length."""
        if error.exceeds_context and model.max_model_len is not None:
            self._too_short = max(self._too_short, model.max_model_len)

    async def fit(self, model: TextModel, request: TextRequest) -> TextRequest:
        """Return the request with its prompt encoded for the model, where its length matters. Raises INVALID where it
        is too long for the model and may fit another."""
        request = msgspec.structs.replace(request, prompt=sent_prompt(request.prompt))
        length = model.max_model_len
        if length is None or (length >= self._longest and not self._has_unknown):
            return request
        prompt = await model.prepare_shared(request.prompt, request.prompt_form)
        if isinstance(prompt, EncodedPrompt):
            num_prompt, max_tokens = len(prompt.token_ids), request.sampling.get("max_tokens") or 1
            if num_prompt + max_tokens > length:
                what = f"the prompt has {num_prompt} tokens and {max_tokens} of output are asked"
                raise too_long("prompt", f"{what}; the context of model '{model.name}' is {length} tokens")
        return msgspec.structs.replace(request, prompt=prompt)
