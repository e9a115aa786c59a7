"""The prompt as the beginning of its own answer."""

import msgspec

from pipelines.text.tokenizer import Tokenizer
from pipelines.text.types import EncodedPrompt, Prompt, TextEvent


class PromptEcho:
    """Puts a prompt's text, and the log probabilities of its tokens, before those of the first event."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, token_ids: list[int]) -> None:
        """A text comes back as it was sent; token ids as the text that they stand for."""
        source = prompt.source if isinstance(prompt, EncodedPrompt) else prompt
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.feed((token_id,)) for token_id in token_ids]
        pieces.append(detokenizer.flush())
        self.text = source if isinstance(source, str) else "".join(pieces)
        self._pieces = pieces

    def starts(self) -> list[int]:
        """Where each token begins. A tokenizer that changes the text's length makes the last ones approximate."""
        starts, made = [], 0
        for piece in self._pieces[:-1]:
            starts.append(min(made, len(self.text)))
            made += len(piece)
        return starts

    def before(self, event: TextEvent) -> TextEvent:
        """The first event, with the prompt before it."""
        detail = event.detail
        if detail is not None and detail.logprobs is not None:
            told = [*(detail.prompt_logprobs or ()), *detail.logprobs]
            detail = msgspec.structs.replace(detail, logprobs=told)
        return msgspec.structs.replace(event, text=self.text + event.text, detail=detail)
