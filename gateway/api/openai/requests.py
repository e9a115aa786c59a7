"""Translates the fields that chats, completions and responses share: sampling, beams, retrieval, templates."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import Request

from sluice.engine.sampling_fields import MAX_SEED
from sluice.engine.types import Grammar
from sluice.errors import invalid
from sluice.gateway.api.openai.constraints import CONSTRAINT_FIELDS, parse_constraint
from sluice.gateway.api.openai.reply import OpenAIReply, ReplyOptions, error_frame
from sluice.gateway.api.openai.schemas import (
    MAX_SEQUENCES,
    GenerationRequest,
    RetrievalFields,
    StreamOptions,
    TemplateFields,
)
from sluice.gateway.api.translators import Reply, Translator, read_sampling, stop_strings
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.parsing import retriever_parameters
from sluice.gateway.front.http.request import get_begin_time
from sluice.pipelines.llm.text_models import SEPARATOR
from sluice.pipelines.rag.filters import parse_filter
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.stream import sent_prompt
from sluice.pipelines.text.types import (
    EFFORT_ARGUMENT,
    THINKING_SWITCHES,
    ChatReader,
    Conversation,
    Prompt,
    PromptForm,
    SamplingOverrides,
    TemplateOptions,
    TextForm,
    TextRequest,
)

GenerationT = TypeVar("GenerationT", bound=GenerationRequest)
_NO_BEAMS = "the most that this server decodes with is a beam width of 1; ask for several answers with n"
_RETRIEVAL_NAMES = {"parameters": "rag", **{name: f"rag.{name}" for name in ("collection", "filter", "mode")}}
_TIER_PRIORITIES = {"priority": -1, "fast": -1, "ultrafast": -1, "flex": 1}
"""Priorities of the service tiers besides the default one's 0. Lower runs earlier."""


class OpenAITranslator(Translator[GenerationT]):
    """A request with the fields that chats, completions and responses share."""

    names: ClassVar[Mapping[str, str]] = {}
    """The client's names of fields that models name otherwise in their errors."""
    reply_type: type[OpenAIReply]
    encode_error = staticmethod(error_frame)
    options: ReplyOptions
    """The parts of the answer that the client chooses, known once the request is parsed."""

    def __init__(self, fields: GenerationT, request: Request) -> None:
        super().__init__(fields, request)
        self.param_names = self.names
        self.began_at = get_begin_time(request)

    @property
    def model_name(self) -> str:
        """The model with its LoRA adapter, whichever of the two fields names that."""
        name, adapter = self.fields.model, self.fields.lora_request
        if adapter is None or name.endswith(SEPARATOR + adapter.lora_name):
            return str(name)
        return f"{name}{SEPARATOR}{adapter.lora_name}"

    @property
    def model_key(self) -> str:
        return self.fields.prompt_cache_key or ""

    @property
    def priority(self) -> int | None:
        """The priority that the body asks for, by its number or by its service tier."""
        fields = self.fields
        return _TIER_PRIORITIES.get(fields.service_tier or "") if fields.priority is None else fields.priority

    @property
    def session(self) -> str | None:
        return self.fields.prompt_cache_key or self.fields.user

    def parse_generation(
        self,
        base: TextRequest,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        logprobs: int | None,
        best_of: int | None = None,
    ) -> list[TextRequest]:
        """Return a request for each sequence. `logprobs` is the number of alternatives to return; None for no log
        probabilities. Raises INVALID for fields that contradict each other."""
        fields, n = self.fields, self.fields.n or 1
        best_of = best_of or n
        self._check_sequences(len(prompts), best_of)
        constraint = None if CONSTRAINT_FIELDS.isdisjoint(fields.model_fields_set) else parse_constraint(fields)
        limit = None if constraint is None else constraint[1]
        ranks = logprobs is None and best_of > n  # they rank the sequences
        sampling = read_sampling(
            fields,
            max_tokens=max_tokens,
            logprobs=0 if ranks else logprobs,
            prompt_logprobs=_highest(fields.prompt_logprobs, logprobs if base.echo else None),
            grammar=limit if isinstance(limit, Grammar) else None,
            beam_width=self._beam_width(),
        )
        common = msgspec.structs.replace(
            base,
            stop=stop_strings(fields.stop),
            bad_words=tuple(fields.bad_words or ()),
            structural_tag=limit if isinstance(limit, str) else "",
            form=_form(fields),
            prompt_form=_prompt_form(fields, max_tokens),
            cache_salt=fields.cache_salt or "",
            parameters=_retrieval_parameters(fields.rag),
        )
        self.num_prompts = len(prompts)
        self.options = ReplyOptions(
            num_prompts=len(prompts),
            n=n,
            best_of=best_of,
            **_usage_options(fields.stream_options),
            service_tier={"auto": "default"}.get(fields.service_tier or "", fields.service_tier),
            top_logprobs=logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            returns_token_ids=bool(fields.return_token_ids),
            names_tokens_by_id=bool(fields.return_tokens_as_token_ids),
        )
        ranking, limiting = {"logprobs": "best_of"} if ranks else {}, {"grammar": constraint[0]} if constraint else {}
        self.param_names = {**_retrieval_param_names(fields), **self.names, **ranking, **limiting}
        return [
            msgspec.structs.replace(common, prompt=prompt, sampling=_sequence_sampling(sampling, index))
            for prompt in prompts
            for index in range(best_of)
        ]

    def check(self, model: TextModel, readers: Sequence[ChatReader]) -> None:
        """Raise INVALID for a beam search that `model` cannot do."""
        fields, width, most = self.fields, self._beam_width(), model.max_beam_width
        if width is None:
            return
        if most == 1 and fields.use_beam_search:
            raise invalid("use_beam_search", f"use_beam_search must be false: {_NO_BEAMS}")
        if most == 1:
            raise invalid("beam_width", f"beam_width must be 1, got {fields.beam_width}: {_NO_BEAMS}")
        if width < 2:
            raise invalid("use_beam_search", "use_beam_search needs best_of or beam_width, of at least 2: the beams")
        if width > most:
            name = next(name for name in ("beam_width", "best_of", "n") if getattr(fields, name) is not None)
            raise invalid(name, f"{name} must be at most {most}, the beams of this model, got {width}")
        if (fields.n or 1) > 1:
            reason = "the best beam is the answer; say how many there are with best_of or beam_width"
            raise invalid("n", f"n must be 1 with a beam search, got {fields.n}: {reason}")

    @property
    def wants_beams(self) -> bool:
        return bool(self.fields.use_beam_search) or self.fields.beam_width not in (None, 1)

    def _beam_width(self) -> int | None:
        """Return the number of beams, from `beam_width`, `best_of` or `n`; None without a beam search."""
        fields = self.fields
        return (fields.beam_width or fields.best_of or fields.n or 1) if self.wants_beams else None

    def _check_sequences(self, num_prompts: int, best_of: int) -> None:
        if best_of * num_prompts > MAX_SEQUENCES:
            name = "best_of" if best_of > (self.fields.n or 1) else "n"
            most = f"at most {MAX_SEQUENCES} sequences may be generated for one request"
            raise invalid(name, f"{name} is {best_of} and there are {num_prompts} prompts; {most}")

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        return ["store"] if self.fields.store else []

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        return self._make_reply(self.reply_type, model)

    def _make_reply(self, make: Callable[..., OpenAIReply], model: TextModel) -> OpenAIReply:
        return make(
            reply_id=f"{self.reply_type.id_prefix}-{self.request_id}",
            created=int(self.began_at),
            model=model.name,
            fingerprint=model.fingerprint,
            options=self.options,
        )

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.stream)


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Return the variables by which chat templates take how long the model thinks, or whether it does."""
    if effort is None:
        return {}
    sent = {} if effort == "none" else {EFFORT_ARGUMENT: effort}
    return sent | dict.fromkeys(THINKING_SWITCHES, effort not in ("none", "minimal"))


def can_reason(model: TextModel, request: TextRequest, known: Collection[str] = ()) -> bool:
    """Whether an answer may have reasoning, which a budget ends and an effort limits: whether the model has a format of
    it, and its template, with the `known` names, does not switch it off."""
    prompt = sent_prompt(request.prompt)
    arguments = prompt.options.arguments if isinstance(prompt, Conversation) else {}
    if any(name in known and arguments.get(name) is False for name in THINKING_SWITCHES):
        return False
    reader = model.chat_reader(request)
    return reader is not None and reader.finds_reasoning


def parse_template_options(fields: TemplateFields, arguments: Mapping[str, Any], **more: Any) -> TemplateOptions:
    """Return how a conversation is rendered. `arguments` are fields that become variables of the template, and win over
    `chat_template_kwargs`; `more` are further options. Raises INVALID for fields that contradict each other."""
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true: the answer either goes on with the last "
            "message or is a new one",
        )
    adds = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    return TemplateOptions(
        documents=tuple(fields.documents or ()),
        template=fields.chat_template,
        arguments={**(fields.chat_template_kwargs or {}), **arguments},
        adds_generation_prompt=adds,
        continues_final_message=continues,
        **more,
    )


def check_trust(fields: TemplateFields, *, trusts_templates: bool) -> None:
    """Raise INVALID for a request with a template of its own, unless the server trusts those."""
    if fields.chat_template is not None and not trusts_templates:
        message = "chat_template is not allowed in requests to this server (--trust-request-chat-template)"
        raise invalid("chat_template", f"{message}; leave it out")


def _usage_options(sent: StreamOptions | None) -> dict[str, bool]:
    """Return whether a stream ends with the counts of its tokens, and whether each of its chunks has them."""
    includes = sent is not None and bool(sent.include_usage)
    return {
        "include_usage": includes,
        "continuous_usage": includes and sent is not None and bool(sent.continuous_usage_stats),
    }


def _sequence_sampling(sampling: SamplingOverrides, index: int) -> SamplingOverrides:
    """Return the sampling of a prompt's sequence number `index`: each sequence has a seed of its own."""
    if "seed" not in sampling or index == 0:
        return sampling
    return {**sampling, "seed": (sampling["seed"] + index) & MAX_SEED}


def _form(fields: GenerationRequest) -> TextForm:
    sent = {name: getattr(fields, name) for name in TextForm.__struct_fields__}
    return TextForm(**{name: value for name, value in sent.items() if value is not None})


def _prompt_form(fields: GenerationRequest, max_tokens: int | None) -> PromptForm:
    if fields.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0")
    return PromptForm(
        suffix=getattr(fields, "suffix", None) or "",
        add_special_tokens=fields.add_special_tokens,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        num_reserved=max_tokens or 1,
    )


def _highest(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _retrieval_param_names(fields: GenerationRequest) -> dict[str, str]:
    """Return the client's names of a retrieving step's parameters. A language model has a `top_k` as well."""
    is_retrieval = fields.rag is not None and fields.rag.top_k is not None and fields.top_k is None
    return {**_RETRIEVAL_NAMES, **({"top_k": "rag.top_k"} if is_retrieval else {})}


def _retrieval_parameters(sent: RetrievalFields | None) -> dict[str, str | int | float | bool]:
    """Return the request parameters of a retrieving step. Raises INVALID for a filter that cannot be read."""
    if sent is None:
        return {}
    with client_names({"filter": "rag.filter"}):
        parse_filter(sent.filter)
    return retriever_parameters(sent.collection, sent.top_k, sent.mode, sent.filter)
