"""Sampling parameters."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from ._stand_in.settings import settings
from ._stand_in.specifications import Parameter
from ._stand_in.values import make_value


class LogitsProcessor(ABC):
    """Edits one request's logits in place."""

    @abstractmethod
    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None: ...


class BatchedLogitsProcessor(ABC):
    """Edits a batch's logits in place."""

    @abstractmethod
    def __call__(
        self,
        req_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream_ptr: int,
        client_ids: list[int | None],
    ) -> None: ...


@dataclass(slots=True, kw_only=True)
class AdditionalModelOutput:
    name: str
    gather_context: bool


class _Guides:
    """Rules of GuidedDecodingParams."""

    __slots__ = ()

    def _validate(self) -> None:
        guides = [each.name for each in fields(self) if getattr(self, each.name)]  # type: ignore[arg-type]
        if len(guides) > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {len(guides)}.")


GuidedDecodingParams = make_value("GuidedDecodingParams", "guided_decoding_params", _Guides, __name__)


class _Rules:
    """Rules of SamplingParams."""

    __slots__ = ("_stop_word_ids",)

    def __post_init__(self: Any) -> None:
        self._stop_word_ids = None
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        self._validate()

    def _validate(self: Any) -> None:
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        allows = os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING")  # noqa: TID251
        if self.best_of > 1 and self._greedy_decoding and not allows:
            raise ValueError(f"Greedy decoding does not allow several returns: best_of must be 1, got {self.best_of}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        self.logprobs = self.logprobs and int(self.logprobs)
        self.prompt_logprobs = self.prompt_logprobs and int(self.prompt_logprobs)

    @property
    def _greedy_decoding(self: Any) -> bool:
        return not self.use_beam_search and self.top_k in (None, 1) and self.top_p in (None, 0.0)

    def _setup(self: Any, tokenizer: Any) -> Any:
        """Add what only the tokenizer knows: the end, and the ids of stop and bad words."""
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
            self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self._stop_word_ids = [tokenizer.encode(each, add_special_tokens=False) for each in stop]
        return self

    def _stop_words(self: Any) -> list[tuple[Any, list[int]]]:
        """Return the stop reason and token ids of each stop word."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [(each, [each]) for each in self.stop_token_ids or []] + list(
            zip(stop, self._stop_word_ids or [], strict=False)
        )


_SINCE_1_3 = {"logprobs_mode": Parameter("Optional[str]", "RAW")} if settings().version != "1.2.1" else {}
_NOT_IN_FILES = {"prompt_ignore_length": Parameter("Optional[int]", None), **_SINCE_1_3}
if settings().version == "1.4.0":  # NVIDIA's pull 16463
    _NOT_IN_FILES["bad_token_ids"] = Parameter("Optional[List[Union[int, List[int]]]]", None)

SamplingParams = make_value("SamplingParams", "sampling_params", _Rules, __name__, _NOT_IN_FILES)
