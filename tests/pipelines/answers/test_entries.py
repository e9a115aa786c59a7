"""What is kept of answers, and which requests share one."""

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.types import FinishReason, Grammar, GrammarKind
from sluice.pipelines.answers.cache import (
    decode_event,
    decode_vectors,
    encode_event,
    encode_vectors,
    merge_events,
    text_key,
    vectors_key,
)
from sluice.pipelines.encoding.encoder import Embeddings
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    EncodedPrompt,
    PromptForm,
    TemplateOptions,
    TextDetail,
    TextEvent,
    TextForm,
    TextLogprob,
    TextRequest,
    TokenText,
    ToolChoice,
)

CONVERSATION = Conversation((ChatMessage("user", "Hi"),), TemplateOptions(tools=({"type": "function"},)))
REQUEST = TextRequest(request_id="first", prompt=EncodedPrompt("Hi", [1, 2]), sampling={"temperature": 0})
CHANGED: dict[str, Any] = {
    "prompt": EncodedPrompt("Hi", [1, 3]),
    "sampling": {"temperature": 0, "logit_bias": {5: 1.0, 3: 2.0}, "grammar": Grammar(GrammarKind.REGEX, "a+")},
    "default_max_tokens": 5,
    "stop": ("x",),
    "bad_words": ("x",),
    "biased_words": (("x", 1.0),),
    "echo": True,
    "prediction": "x",
    "structural_tag": "{}",
    "form": TextForm(skip_special_tokens=False),
    "prompt_form": PromptForm(suffix="x"),
    "cache_salt": "x",
    "adapter": "x",
    "tool_choice": ToolChoice(is_required=True),
    "thinking_token_budget": 5,
    "parameters": {"top_k": 3},
    "returns_metrics": True,
    "returns_context_logits": True,
    "returns_generation_logits": True,
}
UNCHANGED: dict[str, Any] = {
    "request_id": "second",
    "priority": 3,
    "tenant": "x",
    "timeout_s": 1.0,
    "queue_timeout_s": 1.0,
    "protocol": "openai_chat",
    "session": "x",
    "parent_session": "x",
    "requires_budget": False,
}


def key(**fields: Any) -> bytes:
    return text_key("model", None, msgspec.structs.replace(REQUEST, **fields))


def test_each_field_of_a_request_is_in_its_key_or_changes_no_answer() -> None:
    assert set(TextRequest.__struct_fields__) == CHANGED.keys() | UNCHANGED.keys()
    assert {key(**{name: value}) for name, value in UNCHANGED.items()} == {key()}
    keys = [key(), *(key(**{name: value}) for name, value in CHANGED.items())]
    assert len(set(keys)) == len(keys)


def test_model_scope_and_tenant_are_in_the_key() -> None:
    made = [
        text_key(*each)
        for each in (("a", None, REQUEST), ("b", None, REQUEST), ("a", "", REQUEST), ("a", "x", REQUEST))
    ]
    made += [text_key("a", "", REQUEST, "x"), vectors_key("a", None, ["Hi"], {})]
    assert len(set(made)) == len(made)


def test_the_order_of_fields_is_not() -> None:
    first = {"temperature": 0, "logit_bias": {3: 2.0, 5: 1.0}}
    second = {"logit_bias": {5: 1.0, 3: 2.0}, "temperature": 0}
    assert key(sampling=first) == key(sampling=second)


@pytest.mark.parametrize("images", [(b"one",), (b"two",)])
def test_images_and_conversations_are_in_the_key(images: tuple[bytes, ...]) -> None:
    plain = EncodedPrompt(CONVERSATION, [1, 2])
    other = Conversation(CONVERSATION.messages, TemplateOptions(tools=({"type": "other"},)))
    made = [plain, EncodedPrompt(CONVERSATION, [1, 2], images), EncodedPrompt(other, [1, 2])]
    assert len({key(prompt=each) for each in made}) == 3


def event(text: str, token_ids: list[int], number: int) -> TextEvent:
    """Return the event of some tokens of an answer with all details."""
    logprobs = [
        TextLogprob(TokenText(each, "t", b"t"), -0.5, 0, ((TokenText(1, "u", b"u"), -1.5),)) for each in token_ids
    ]
    detail = TextDetail(logprobs=logprobs, total_logprob=-float(number), token_ids=token_ids)
    return TextEvent(text, len(token_ids), 7, number, detail=detail)


@given(st.lists(st.tuples(st.text(max_size=4), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=6))
def test_an_answer_in_one_event_says_the_same_however_it_was_cut(pieces: list[tuple[str, list[int]]]) -> None:
    events, number = [], 0
    for text, token_ids in pieces:
        number += len(token_ids)
        events.append(event(text, token_ids, number))
    start = msgspec.structs.replace(events[0].detail or TextDetail(), prompt_end="<think>", prompt_token_ids=[4, 5])
    events[0] = msgspec.structs.replace(events[0], detail=start)
    end = msgspec.structs.replace(events[-1].detail or TextDetail(), token_starts=array("I", [0, 2]), num_drafted=3)
    events[-1] = msgspec.structs.replace(
        events[-1], finish_reason=FinishReason.STOP, stop_reason="x", cached_tokens=3, detail=end
    )
    kept = decode_event(encode_event(merge_events(events)))
    all_ids = [each for _, token_ids in pieces for each in token_ids]
    assert kept is not None and kept.detail is not None
    assert kept.text == "".join(text for text, _ in pieces)
    assert (kept.num_tokens, kept.completion_tokens, kept.prompt_tokens) == (len(all_ids), len(all_ids), 7)
    assert (kept.finish_reason, kept.stop_reason, kept.cached_tokens) == (FinishReason.STOP, "x", 3)
    assert [each.token.token_id for each in kept.detail.logprobs or ()] == kept.detail.token_ids == all_ids
    assert (kept.detail.prompt_end, kept.detail.prompt_token_ids) == ("<think>", [4, 5])
    assert (list(kept.detail.token_starts), kept.detail.num_drafted) == ([0, 2], 3)
    assert kept.detail.total_logprob == -float(number)


def test_a_plain_answer_has_no_details() -> None:
    events = [TextEvent("a", 1, 5, 1), TextEvent("b", 1, 5, 2, FinishReason.LENGTH)]
    assert decode_event(encode_event(merge_events(events))) == TextEvent("ab", 2, 5, 2, FinishReason.LENGTH)


def test_vectors_are_the_same_again() -> None:
    found = Embeddings(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3), 9)
    kept = decode_vectors(encode_vectors(found))
    assert kept is not None
    assert kept.num_tokens == 9
    np.testing.assert_array_equal(kept.vectors, found.vectors)


@pytest.mark.parametrize(
    "value", [b"", b"\xc1", b"\x93\x92\x02\x02\x01\xc4\x01x", encode_event(TextEvent("a", 1, 1, 1))]
)
def test_a_value_of_another_kind_is_none(value: bytes) -> None:
    assert decode_vectors(value) is None
    assert decode_event(value[:-1]) is None
