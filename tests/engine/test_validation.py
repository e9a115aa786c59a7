import math

import msgspec
import pytest

from sluice.engine.sampling_fields import OPTIONAL_FIELDS
from sluice.engine.types import EngineInfo, GenerateRequest, Grammar, GrammarKind, SamplingParams, ThinkingBudget
from sluice.engine.validation import check_request, check_sampling, num_tokens_after
from sluice.errors import ErrorCode, SluiceError


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "between 0 and 2"),
        ("temperature", 2.5, "between 0 and 2"),
        ("temperature", math.nan, "between 0 and 2"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.5, "greater than 0 and at most 1"),
        ("top_k", -1, "between 0 (off) and 2147483647"),
        ("top_k", 2**70, "between 0 (off) and 2147483647"),
        ("min_p", -0.5, "between 0 and 1"),
        ("presence_penalty", 3.0, "between -2 and 2"),
        ("frequency_penalty", -3.0, "between -2 and 2"),
        ("repetition_penalty", 0.0, "greater than 0"),
        ("repetition_penalty", math.inf, "greater than 0"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", -5, "1 or more"),
        ("min_tokens", -1, "between 0 and max_tokens (16)"),
        ("min_tokens", 17, "between 0 and max_tokens (16)"),
        ("seed", -1, "between 0 and 18446744073709551615"),
        ("stop_token_ids", (3, -2), "between 0 and 2147483647"),
        ("stop_token_ids", (3, 2**31), "between 0 and 2147483647"),
        ("typical_p", 0.0, "greater than 0 and at most 1"),
        ("typical_p", 1.1, "greater than 0 and at most 1"),
        ("logprobs", -1, "between 0 and 20"),
        ("logprobs", 21, "between 0 and 20"),
        ("prompt_logprobs", 21, "between 0 and 20"),
        ("length_penalty", -1.0, "0 or more"),
        ("length_penalty", math.inf, "0 or more"),
        ("beam_search_diversity_rate", -0.5, "0 or more"),
        ("beam_search_diversity_rate", math.nan, "0 or more"),
        ("early_stopping", -1, "between 0 and 2147483647"),
        ("no_repeat_ngram_size", -1, "between 1 and 2147483647"),
        ("no_repeat_ngram_size", 2**31, "between 1 and 2147483647"),
        ("top_p_min", 1.5, "between 0 and 1"),
        ("top_p_min", math.nan, "between 0 and 1"),
        ("top_p_decay", 0.0, "greater than 0 and at most 1"),
        ("top_p_decay", 2.0, "greater than 0 and at most 1"),
        ("top_p_reset_ids", -1, "between 0 and 2147483647"),
    ],
)
def test_out_of_range_names_field_value_and_range(field: str, value: object, allowed: str) -> None:
    with pytest.raises(SluiceError) as caught:
        check_sampling(SamplingParams(**{field: value}))  # type: ignore[arg-type]
    shown = value[-1] if isinstance(value, tuple) else value
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == field
    assert caught.value.message == f"{field} must be {allowed}, got {shown}"


def test_the_edges_are_allowed() -> None:
    check_sampling(SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, seed=2**64 - 1, max_tokens=1, min_tokens=1))
    check_sampling(SamplingParams(temperature=2, top_p=0.01, presence_penalty=-2, frequency_penalty=2))


INFO = EngineInfo(
    runtime="null",
    model_type="null",
    dtype="f32",
    vocab_size=100,
    eos_token_ids=(0,),
    max_model_len=64,
    block_size=8,
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    load_seconds=0.0,
)


def request(sampling: dict[str, object] | None = None, **fields: object) -> GenerateRequest:
    params = SamplingParams(**(sampling or {}))  # type: ignore[arg-type]
    given = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling": params, **fields}
    return GenerateRequest(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        (
            request({"logit_bias": {100: 1.0}}),
            "logit_bias",
            "token ids of logit_bias must be between 0 and 99, got 100",
        ),
        (
            request({"logit_bias": {5: 101.0}}),
            "logit_bias",
            "logit_bias of token 5 must be between -100 and 100, got 101.0",
        ),
        (
            request({"logit_bias": {5: math.nan}}),
            "logit_bias",
            "logit_bias of token 5 must be between -100 and 100, got nan",
        ),
        (
            request({"allowed_token_ids": (3, 100)}),
            "allowed_token_ids",
            "allowed_token_ids must be between 0 and 99, got 100",
        ),
        (
            request({"bad_words": ((3,), ())}),
            "bad_words",
            "bad_words must be sequences of at least 1 token, got an empty one",
        ),
        (
            request({"thinking_token_budget": ThinkingBudget(1, (), (2,))}),
            "thinking_token_budget",
            "thinking_token_budget must be 0 or more tokens, and have tokens that open and close the reasoning, got "
            "ThinkingBudget(num_tokens=1, start=(), end=(2,))",
        ),
        (
            request({"thinking_token_budget": ThinkingBudget(1, (1,), (2, 100))}),
            "thinking_token_budget",
            "its token ids must be between 0 and 99, got 100",
        ),
        (request({"bad_words": ((3, -1),)}), "bad_words", "token ids of bad_words must be between 0 and 99, got -1"),
        (request(resume_token_ids=[100]), "resume_token_ids", "resume_token_ids must be between 0 and 99, got 100"),
        (
            request({"max_tokens": 2}, resume_token_ids=[5, 6]),
            "resume_token_ids",
            "resume_token_ids must be fewer than max_tokens (2), which counts them too, got 2",
        ),
        (request(prompt_token_ids=[3, 100]), "prompt", "token ids of the prompt must be between 0 and 99, got 100"),
        (request(timeout_s=0.0), "timeout_s", "timeout_s must be greater than 0 seconds, got 0.0"),
        *(
            (request(weight=weight), "weight", f"weight must be a finite number above 0, got {weight}")
            for weight in (0.0, -0.0, -1.0, math.nan, math.inf)
        ),
        (
            request(queue_timeout_s=math.nan),
            "queue_timeout_s",
            "queue_timeout_s must be greater than 0 seconds, got nan",
        ),
        (request(priority=2**31), "priority", "priority must be between -2147483648 and 2147483647, got 2147483648"),
        (request(tenant="t" * 257), "tenant", "tenant must have at most 256 characters, got 257"),
        (request(cache_salt="s" * 300), "cache_salt", "cache_salt must have at most 256 characters, got 300"),
        (
            request({"grammar": Grammar(GrammarKind.JSON_OBJECT), "ignore_eos": True}),
            "ignore_eos",
            "ignore_eos must be false where the output has to match a grammar, got true; "
            "such an output ends with the end of sequence",
        ),
    ],
)
def test_a_request_out_of_range_is_told_what_is_allowed(wrong: GenerateRequest, param: str, message: str) -> None:
    with pytest.raises(SluiceError) as caught:
        check_request(wrong, INFO)
    assert (caught.value.code, caught.value.param, caught.value.message) == (ErrorCode.INVALID, param, message)


def test_a_prompt_longer_than_the_cache_is_allowed_where_attention_keeps_only_a_window() -> None:
    small = msgspec.structs.replace(INFO, max_model_len=200, block_size=4, num_blocks=8)
    longer = request({"max_tokens": 5}, prompt_token_ids=[1] * 100)
    with pytest.raises(SluiceError, match="whole KV cache has 8 blocks"):
        check_request(longer, small)
    with pytest.raises(SluiceError, match="whole KV cache has 8 blocks"):
        check_request(longer, msgspec.structs.replace(small, max_cached_tokens=36))
    windowed = msgspec.structs.replace(small, max_cached_tokens=32)
    check_request(longer, windowed)
    assert (num_tokens_after(20, small), num_tokens_after(20, windowed)) == (13, 180)


def test_the_edges_of_a_request_are_allowed() -> None:
    sampling = {
        "max_tokens": 3,
        "logit_bias": {0: -100.0, 99: 100.0},
        "bad_words": ((99,), (0, 1)),
        "grammar": Grammar(GrammarKind.JSON_OBJECT),
    }
    check_request(
        request(
            sampling,
            resume_token_ids=[0, 99],
            priority=-(2**31),
            tenant="t" * 256,
            cache_salt="s" * 256,
            timeout_s=0.001,
            queue_timeout_s=3600.0,
        ),
        INFO,
    )


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        (
            request({"beam_width": 2}),
            "beam_width",
            "beam_width needs the TensorRT-LLM runtime; this model is served by null",
        ),
        (
            request({"top_p_decay": 0.5}),
            "top_p_decay",
            "top_p_decay needs the TensorRT-LLM runtime; this model is served by null",
        ),
        (
            request({"grammar": Grammar(GrammarKind.EBNF, "x")}),
            "grammar",
            "this model's runtime keeps to no grammar of the kind ebnf; it has: regex, choice",
        ),
        (request(adapter="poet"), "adapter", "there is no adapter 'poet'; this model has: clerk, judge"),
    ],
)
def test_what_this_runtime_lacks_is_refused(wrong: GenerateRequest, param: str, message: str) -> None:
    info = msgspec.structs.replace(
        INFO, adapters=("clerk", "judge"), grammar_kinds=(GrammarKind.REGEX, GrammarKind.CHOICE)
    )
    with pytest.raises(SluiceError) as caught:
        check_request(wrong, info)
    assert (caught.value.code, caught.value.param, caught.value.message) == (ErrorCode.INVALID, param, message)


def test_what_this_runtime_has_is_allowed() -> None:
    names = ("beam_width", "top_p_decay", "length_penalty")
    info = msgspec.structs.replace(INFO, sampling_fields=names, max_beam_width=4, adapters=("clerk",))
    check_request(request({"beam_width": 4, "top_p_decay": 0.5, "length_penalty": 1.0}, adapter="clerk"), info)
    for beam_width in (0, 5):
        with pytest.raises(
            SluiceError, match=rf"beam_width must be between 1 and 4 \(max_beam_width\), got {beam_width}"
        ):
            check_request(request({"beam_width": beam_width}), info)
    with pytest.raises(SluiceError, match="this model has: none"):
        check_request(request(adapter="clerk"), INFO)


REFUSING = msgspec.structs.replace(INFO, refused_sampling={"seed": "seed cannot be used", "min_p": "min_p cannot"})


@pytest.mark.parametrize(("name", "value"), [("seed", 7), ("min_p", 0.1)])
def test_what_the_runtime_s_sampler_would_leave_out_is_refused(name: str, value: float) -> None:
    with pytest.raises(SluiceError) as caught:
        check_request(request({"temperature": 1.0, name: value}), REFUSING)
    told = (caught.value.code, caught.value.param, caught.value.message)
    assert told == (ErrorCode.INVALID, name, REFUSING.refused_sampling[name])


def test_what_has_no_effect_anyway_is_allowed_where_it_would_be_left_out() -> None:
    check_request(request({"temperature": 0.0, "seed": 7, "min_p": 0.0}), REFUSING)


def test_every_field_of_some_runtimes_is_known_here() -> None:
    """OPTIONAL_FIELDS are the fields from `beam_width` on in SamplingParams."""
    fields = SamplingParams.__struct_fields__
    assert fields[fields.index("beam_width") :] == OPTIONAL_FIELDS
