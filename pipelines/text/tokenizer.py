"""Text and conversations to token ids, exactly as transformers makes them."""

import asyncio
import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sluice.errors import ErrorCode, SluiceError, invalid, too_long
from sluice.heap import trim_heap
from sluice.pipelines.text.chat_template import ChatTemplate
from sluice.pipelines.text.control_tokens import ControlTokenGuard, RenamingEncoder, SplitEncoder
from sluice.pipelines.text.detokenizer import (
    Detokenizer,
    SlowDetokenizer,
    TokenTexts,
    UnspacedDetokenizer,
    detokenizer_factory,
)
from sluice.pipelines.text.known_prefixes import KnownPrefixes, find_seams
from sluice.pipelines.text.template_forms import TemplateForms, Turn
from sluice.pipelines.text.transformers_tokenizer import SlowBackend, load_tokenizer
from sluice.pipelines.text.turns import strings_in, tool_turns, with_strings
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    EncodedPrompt,
    Prompt,
    PromptForm,
    TemplateOptions,
    TextForm,
)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Roles that a message may have, and their names in the chat template."""
_DEFAULT_OPTIONS, _DEFAULT_FORM = TemplateOptions(), TextForm()
_NO_FRAME: tuple[list[int], list[int]] = ([], [])

TURN_CHARS = 8
"""Characters that a message counts for besides its content."""

INLINE_CHARS = 4000
"""Longest text that is tokenized on the event loop, in under a millisecond. Longer text goes to a worker thread."""

_FREE_CHARS = 1 << 20
"""Length that any text may have. A tokenizer may drop white space or take a long word for one unknown token, so that
the context alone implies no bound."""
_LIKELY_CHARS = 8
"""Characters for each token of the context up to which a text is tokenized without being counted in pieces first."""
_PIECE_CHARS = 64 << 10
_UNSURE_TOKENS = 256
"""Tokens that a piece may have only because a token, or a stretch of `_LONG_SPACE`, was cut."""
_LONG_SPACE = re.compile(r"\s{65,}")

_MAX_CHAR_BYTES = 4

_NUM_WORKERS = 2

T = TypeVar("T")


class FillInTokens(NamedTuple):
    """Tokens that stand before the prefix, before the suffix, and where the model shall begin."""

    prefix: str
    suffix: str
    middle: str


FORMATS = (
    FillInTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillInTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def fill_in_prompt(prefix: str, suffix: str, vocabulary: Container[str]) -> str:
    """Return the text of a prompt. Raises INVALID (param "suffix") for a vocabulary without tokens for it."""
    tokens = next((each for each in FORMATS if all(token in vocabulary for token in each)), None)
    if tokens is None:
        known = ", ".join(each.prefix for each in FORMATS)
        reason = f"the model's tokenizer has no tokens to fill in a middle with (such as {known})"
        raise invalid("suffix", f"suffix must be left out: {reason}")
    return f"{tokens.prefix}{prefix}{tokens.suffix}{suffix}{tokens.middle}"


class Tokenizer:
    """A model's tokenizer and chat template. Control tokens written in a prompt (`<|end|>`) become those tokens, as in
    transformers; in messages they are plain text, unless `allows_special_tokens`."""

    def __init__(self, tokenizer: Any, *, allows_special_tokens: bool = False) -> None:
        """Take a tokenizer of transformers. Raises ValueError where its text cannot be streamed."""
        self._tokenizer = tokenizer
        self._backend: Any
        if tokenizer.is_fast:
            self._backend = tokenizer.backend_tokenizer
            # transformers does this on each call, which would break calls of other threads.
            self._backend.no_truncation()
            self._backend.no_padding()
        else:
            self._backend = SlowBackend(tokenizer)
        self._template = ChatTemplate(tokenizer)
        self._new_detokenizer = self._detokenizers(skip_special_tokens=True)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self._guard = None if allows_special_tokens else self._build_guard()
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, path: Path, *, allows_special_tokens: bool = False) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face checkpoint directory, which takes most of a second. Raises UNAVAILABLE
        where the directory has no usable tokenizer."""
        try:
            return cls(load_tokenizer(path), allows_special_tokens=allows_special_tokens)
        except SluiceError:
            raise
        except Exception as error:  # a damaged file can raise anything in the libraries that read it
            reason = f"{type(error).__name__}: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot load the tokenizer of {path}: {reason}") from error

    def detokenizer(self, form: TextForm = _DEFAULT_FORM) -> Detokenizer:
        """Return a new detokenizer, for one sequence."""
        if form.skip_special_tokens:
            return self._new_detokenizer()
        detokenizer = self._new_showing_detokenizer()
        if form.spaces_between_special_tokens:
            return detokenizer
        return UnspacedDetokenizer(detokenizer, self._added_texts)

    @cached_property
    def _new_showing_detokenizer(self) -> Callable[[], Detokenizer]:
        return self._detokenizers(skip_special_tokens=False)

    @cached_property
    def _added_texts(self) -> dict[int, str]:
        return {i: token.content for i, token in self._backend.get_added_tokens_decoder().items()}

    def _detokenizers(self, *, skip_special_tokens: bool) -> Callable[[], Detokenizer]:
        if self._tokenizer.is_fast:
            return detokenizer_factory(self._backend, skip_special_tokens=skip_special_tokens)
        return partial(SlowDetokenizer, partial(self._backend.decode, skip_special_tokens=skip_special_tokens))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of sequence, which for chat models ends a turn."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def pad_token_id(self) -> int | None:
        """The token that pads shorter sequences."""
        token_id: int | None = self._tokenizer.pad_token_id
        return token_id

    @property
    def template_names(self) -> frozenset[str]:
        """Names that the chat template refers to, variables among them."""
        return self._template.names

    def note_forms(self, conversation: Conversation) -> Conversation:
        """Return a conversation with notes of the turns for which the model's own template has no role."""
        forms, notes = self._template.forms, list[str]()
        if conversation.options.template is None and (forms.hides_calls or forms.hides_results):
            messages = conversation.messages
            if forms.hides_calls and any(each.tool_calls for each in messages):
                notes.append("messages: calls of tools are shown as text: the chat template has no place for them")
            if forms.hides_results and any(ROLES.get(each.role) == "tool" for each in messages):
                notes.append("messages: results of tools are shown as the user's: the chat template has no such role")
        return conversation if not notes else conversation.with_notes(notes)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, including added tokens."""
        return len(self._tokenizer)

    @property
    def chat_template(self) -> str:
        """The text of the chat template, of all where there are several; "" where there is none."""
        return self._template.text

    @property
    def added_tokens(self) -> list[Any]:
        """Tokens that are matched in a text before any other, with `content`, `special` and `normalized`."""
        return list(self._backend.get_added_tokens_decoder().values())

    @cached_property
    def added_token_ids(self) -> dict[str, int]:
        """The ids of the added tokens by their content."""
        return {content: i for i, content in self._added_texts.items()}

    @cached_property
    def _special_frame(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts before and behind a text."""
        plain, framed = (self._backend.encode("a", add_special_tokens=each).ids for each in (False, True))
        starts = range(len(framed) - len(plain) + 1)
        start = next((i for i in starts if framed[i : i + len(plain)] == plain), 0)
        return framed[:start], framed[start + len(plain) :]

    @cached_property
    def _vocabulary(self) -> frozenset[str]:
        """All tokens as the vocabulary writes them."""
        return frozenset(self._tokenizer.get_vocab())

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that a decoded text leaves out."""
        return frozenset(token.content for token in self.added_tokens if token.special)

    @property
    def library_tokenizer(self) -> Any:
        """The tokenizer of the library `tokenizers`, or a slow one in its place. Whoever changes it takes a copy."""
        return self._backend

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The text of single tokens."""
        return TokenTexts(self._backend)

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text of any length, on this thread. Errors name the field `param`."""
        with _refused_surrogates(param):
            if len(text) <= INLINE_CHARS:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:  # `encode` keeps the interpreter's lock, three seconds for a megabyte; a batch releases it
                ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids

    def encode_words(self, text: str, param: str) -> list[int]:
        """Return the token ids of a piece of text, without special tokens. Errors name the field `param`."""
        return self.encode(text, param, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence. Ids that the vocabulary lacks have no text."""
        if len(token_ids) <= INLINE_CHARS:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:  # a batch releases the interpreter's lock
            text = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    def spell(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; "" for an id that the vocabulary lacks."""
        return self._backend.id_to_token(token_id) or ""

    async def encode_prompt(self, prompt: Prompt, form: PromptForm, max_model_len: int) -> list[int]:
        """Return the token ids of any prompt for a model with this context. Raises INVALID for one that cannot be
        encoded, or is too long by far; the engine checks length and range of ids."""
        if isinstance(prompt, EncodedPrompt):
            return prompt.token_ids
        is_cut, frame = form.truncate_prompt_tokens is not None, _NO_FRAME
        if isinstance(prompt, str):
            adds_special = form.add_special_tokens is not False
            text = fill_in_prompt(prompt, form.suffix, self._vocabulary) if form.suffix else prompt
            ids = await self.encode_text(text, max_model_len, add_special_tokens=adds_special, is_cut=is_cut)
            frame = self._special_frame if adds_special and is_cut else frame
        elif isinstance(prompt, Conversation):
            ids = await self.encode_chat(prompt.messages, max_model_len, prompt.options, is_cut=is_cut, salt=form.salt)
            if form.add_special_tokens:
                frame = self._special_frame
                ids = [*frame[0], *ids, *frame[1]]
        else:
            ids = prompt
        return _keep_last(ids, _num_kept(form, max_model_len), frame) if is_cut else ids

    async def encode_prediction(self, text: str, max_tokens: int) -> list[int]:
        """Return the token ids of a text that an answer may repeat, none for none. Raises as `encode_text`."""
        return await self.encode_text(text, max_tokens, add_special_tokens=False) if text else []

    async def encode_text(
        self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        """Return the token ids of plain text, with the special tokens that the tokenizer adds to it. Raises INVALID for
        a long text that has more than `max_tokens`; one that is not so long may have more. Of one that `is_cut` later
        only the characters are bounded."""

        def work() -> list[int]:
            self._check_length(text, "prompt", max_tokens, is_cut)
            return self.encode(text, "prompt", add_special_tokens=add_special_tokens)

        return await self.run(len(text), work)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        max_tokens: int | None = None,
        options: TemplateOptions = _DEFAULT_OPTIONS,
        *,
        is_cut: bool = False,
        salt: str = "",
    ) -> list[int]:
        """Return the token ids of a conversation, as its `options` say: by default up to where the assistant's answer
        begins. The `salt` is that of `PromptForm`. Raises as `encode_text`, and INVALID for no messages, a role not in
        `ROLES`, messages that the model's template refuses, and a model without a template."""
        self._template.check(options)
        forms = self._template.forms
        if options.template is not None:
            forms = await self._template.sandbox.run(partial(self._template.forms_of_client, options))
        turns, strings = _turns(messages, options, forms)
        num_chars = sum(map(len, strings)) + TURN_CHARS * len(messages)
        if max_tokens is not None and num_chars > self._max_chars(max_tokens):
            raise _too_long("messages", f"{num_chars} characters", max_tokens)

        def work() -> list[int]:
            text = self._template.render(turns, options, forms)
            self._check_length(text, "messages", max_tokens, is_cut)
            return self._encode_turns(text, turns, strings, options, forms, salt)

        if options.template is not None:
            return await self._template.sandbox.run(work)
        return await self.run(num_chars, work, trims=False)

    def _encode_turns(
        self,
        text: str,
        turns: list[Turn],
        strings: list[str],
        options: TemplateOptions,
        forms: TemplateForms,
        salt: str,
    ) -> list[int]:
        # The template writes the special tokens itself.
        guard, render = self._guard, self._template.render
        if guard is not None and _have_any(strings, guard.first_chars):
            with _refused_surrogates("messages"):
                if guard.is_needed(strings):
                    work = partial(
                        guard.encode, strings, lambda shielded: render(*_shielded(turns, options, shielded), forms)
                    )
                    return _trim_after(work, len(text))
        if len(text) <= INLINE_CHARS or self._known_prefixes is None:
            return self._encode_piece(text)
        with _refused_surrogates("messages"):
            return self._known_prefixes.encode(text, salt)

    @cached_property
    def _known_prefixes(self) -> KnownPrefixes | None:
        """Tokenizes long conversations; None for a tokenizer whose texts have no seams."""
        seams = find_seams(self.added_tokens) if self._tokenizer.is_fast else ()
        return KnownPrefixes(self._encode_piece, seams) if seams else None

    def _encode_piece(self, text: str) -> list[int]:
        """Return the token ids of a conversation's text, or of what is new of it."""
        return _trim_after(partial(self.encode_words, text, "messages"), len(text))

    async def run(self, num_chars: int, work: Callable[[], T], *, trims: bool = True) -> T:
        """Return the result of `work`, which tokenizes so many characters: on a worker thread where they are many. It
        is followed by a trim of the heap, unless it sees to that itself."""
        if num_chars <= INLINE_CHARS:
            return work()
        if trims:
            work = partial(_trim_after, work, num_chars)
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def refuse_long(self, text: bytes | memoryview | str, param: str, max_tokens: int) -> None:
        """Raise INVALID for a text, or its UTF-8, that is too long by its length alone: it need not be read."""
        if len(text) > _MAX_CHAR_BYTES * self._max_chars(max_tokens):
            raise _too_long(param, f"{len(text)} {'characters' if isinstance(text, str) else 'bytes'}", max_tokens)

    def _check_length(self, text: str, param: str, max_tokens: int | None, is_cut: bool) -> None:
        """Raise INVALID for a long text that has more than `max_tokens` tokens, without tokenizing all of it: that
        takes seconds and hundreds of bytes a token. One with a few more may pass."""
        if max_tokens is None or len(text) <= max(_PIECE_CHARS, _LIKELY_CHARS * max_tokens):
            return
        if len(text) > self._max_chars(max_tokens):
            raise _too_long(param, f"{len(text)} characters", max_tokens)
        if is_cut:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = _LONG_SPACE.sub(" ", text[start : start + _PIECE_CHARS])
            num_tokens += max(0, len(self.encode_words(piece, param)) - _UNSURE_TOKENS)
            if num_tokens > 2 * max_tokens:
                raise _too_long(param, f"{len(text)} characters", max_tokens)

    def _max_chars(self, max_tokens: int) -> int:
        return max(_FREE_CHARS, self._longest_token * max_tokens)

    def _build_guard(self) -> ControlTokenGuard | None:
        """Return the guard of messages; None for a tokenizer without control tokens."""
        named = set(self._tokenizer.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        special = {i: token for i, token in added.items() if (token.special or i in named) and token.content}
        if not special:
            return None
        is_fast = self._tokenizer.is_fast
        encode = RenamingEncoder(self._backend, special) if is_fast else SplitEncoder(self._tokenizer)
        return ControlTokenGuard(list(special.values()), self._backend.normalizer, encode)


def _num_kept(form: PromptForm, max_model_len: int) -> int:
    assert form.truncate_prompt_tokens is not None
    if form.truncate_prompt_tokens >= 0:
        return form.truncate_prompt_tokens
    return max(1, max_model_len - form.num_reserved)


def _keep_last(ids: list[int], num_kept: int, frame: tuple[list[int], list[int]]) -> list[int]:
    """Return the last `num_kept` ids, of which the special tokens around a text are some, as in transformers."""
    if len(ids) <= num_kept:
        return ids
    before, behind = frame
    room = num_kept - len(before) - len(behind)
    if room <= 0:
        return ids[-num_kept:]
    end = len(ids) - len(behind)
    return [*before, *ids[end - room : end], *behind]


def _turns(
    messages: Sequence[ChatMessage], options: TemplateOptions, forms: TemplateForms
) -> tuple[list[Turn], list[str]]:
    """Return messages in the form that chat templates read, and all strings in them and in `options` that the client
    wrote. Raises INVALID for no messages and for a role not in `ROLES`."""
    if not messages:
        raise invalid("messages", "messages is empty; at least one message is needed")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            allowed = ", ".join(ROLES)
            raise invalid("messages", f"messages[{index}].role is {message.role!r}; allowed are {allowed}")
    roles = [ROLES[message.role] for message in messages]
    if not (options.tools or options.documents or options.arguments) and not any(map(_has_more, messages)):
        contents = [message.content for message in messages]
        return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)], contents
    turns = tool_turns(messages, roles, forms)
    return turns, strings_in(turns, options)


def _shielded(turns: list[Turn], options: TemplateOptions, strings: list[str]) -> tuple[list[Turn], TemplateOptions]:
    """Return the conversation with other strings, in the order in which `_turns` returned them."""
    if len(strings) > len(turns):
        return with_strings(turns, options, strings)
    return [{**turn, "content": content} for turn, content in zip(turns, strings, strict=True)], options


def _has_more(message: ChatMessage) -> bool:
    """Whether a message has more than a role and a content."""
    return bool(message.tool_calls or message.tool_call_id or message.reasoning or message.name or message.parts)


def _trim_after(work: Callable[[], T], num_chars: int) -> T:
    """Return the result of `work`, without the memory that it freed where it tokenized many characters: a hundred
    megabytes for one of text."""
    try:
        return work()
    finally:
        if num_chars > _PIECE_CHARS:
            trim_heap()


def _too_long(param: str, size: str, max_tokens: int) -> SluiceError:
    return too_long(
        param,
        f"the prompt has {size}, which are more tokens than this model's context: it is {max_tokens} "
        f"tokens and must leave room for at least 1 of output; shorten the prompt",
    )


def _have_any(contents: list[str], parts: Collection[str]) -> bool:
    return any(part in content for content in contents for part in parts)


@contextmanager
def _refused_surrogates(param: str) -> Iterator[None]:
    """Raise INVALID, naming `param`, for a text that the library refuses, as it does lone surrogates alone."""
    try:
        yield
    except TypeError:
        raise invalid(param, f"{param} is not valid Unicode text: it has half a surrogate pair") from None
