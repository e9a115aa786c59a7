"""From our sampling parameters to TensorRT-LLM's, in both versions."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.grammars import BACKENDS, grammar_kinds
from sluice.engine.delegated.tensorrt_llm.library import field_names, load_library
from sluice.engine.delegated.tensorrt_llm.samplers import ModelSampler, SamplerKind
from sluice.engine.delegated.tensorrt_llm.sampling import budget_refusal, sampling_params
from sluice.engine.model_folder import ModelFormat
from sluice.engine.types import GenerateRequest, Grammar, GrammarKind, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_4, imported
from tests.errors import error_of

Sample = Callable[..., Any]
PROMPT = [5, 6, 7]
ENDS = (2, 3)
VOCABULARY = 16


@pytest.fixture
def sample(flavour: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sample]:
    """`sample(temperature=0.5)`; in capitals what is no sampling parameter: `sample(RESUMED=[8])`."""
    with imported(flavour, monkeypatch):
        library = load_library()

        def make(**given: Any) -> Any:
            folder = LlmFolder(
                Path("/model"), ModelFormat.HUGGINGFACE, "llama", "bfloat16", VOCABULARY, given.pop("ENDS", ENDS), 64
            )
            resumed, backend = given.pop("RESUMED", []), given.pop("BACKEND", None)
            sampler = ModelSampler(given.pop("SAMPLER", SamplerKind.TRTLLM), given.pop("VERSION", library.version))
            request = GenerateRequest(
                request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(**given), resume_token_ids=resumed
            )
            return sampling_params(library, request, folder, backend, sampler)

        yield make


def refusal(sample: Sample, **given: Any) -> SluiceError:
    return error_of(sample, **given)


def test_what_nobody_asked_for_stays_at_its_default(sample: Sample) -> None:
    params = sample()
    for name in ("min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"):
        assert getattr(params, name) is None, name
    for name in ("bad_token_ids", "embedding_bias", "guided_decoding", "length_penalty", "prompt_ignore_length"):
        assert getattr(params, name) is None, name
    assert (params.n, params.best_of, params.use_beam_search) == (1, 1, False)


def test_ids_come_in_and_go_out(sample: Sample) -> None:
    params = sample(max_tokens=9, min_tokens=4)
    assert (params.max_tokens, params.min_tokens) == (9, 4)
    assert params.detokenize is False and params.exclude_input_from_output is True
    assert params.include_stop_str_in_output is True and params.return_perf_metrics is True


def test_fewest_tokens_without_an_end_to_ban_are_not_given(sample: Sample) -> None:
    assert sample(min_tokens=4, ignore_eos=True).min_tokens is None


def test_greedy_is_the_likeliest_token_alone(sample: Sample) -> None:
    params = sample(temperature=0.0, top_p=0.5, top_k=40, min_p=0.1, seed=3)
    assert params.top_k == 1
    assert (params.temperature, params.top_p, params.min_p, params.seed) == (None, None, None, None)


def test_sampling_is_said_whole(sample: Sample) -> None:
    """A version counts a request as greedy that names a temperature alone."""
    params = sample(temperature=0.7)
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 0, 1.0)
    assert sample(temperature=0.7, top_p=0.9999999).top_p == 1.0
    params = sample(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=11)
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (40, 0.9, 0.05, 11)


def test_requests_without_a_seed_differ(sample: Sample) -> None:
    seeds = {sample().seed for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**64 for seed in seeds)


def test_penalties_count_the_output(sample: Sample) -> None:
    params = sample(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, RESUMED=[8, 9], max_tokens=9)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, -0.5)
    assert params.prompt_ignore_length == len(PROMPT), "what was generated before a resume counts"
    assert sample(repetition_penalty=1.2).prompt_ignore_length is None


def test_a_version_without_prompt_ignore_length_is_lived_with(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_field(monkeypatch, "prompt_ignore_length")
    assert sample(presence_penalty=0.5).prompt_ignore_length is None


def test_a_version_without_a_field_that_is_asked_for_is_not(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_field(monkeypatch, "top_p_decay")
    assert sample().top_p_decay is None
    error = refusal(sample, top_p_decay=0.5)
    assert (error.code, error.param) == (ErrorCode.UNIMPLEMENTED, "top_p_decay")


def forget_field(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        "sluice.engine.delegated.tensorrt_llm.sampling.field_names", lambda cls: field_names(cls) - {name}
    )


def test_ends_are_the_first_and_the_rest(sample: Sample) -> None:
    params = sample(stop_token_ids=(9, 3, 2))
    assert (params.end_id, params.pad_id, params.stop_token_ids) == (2, 2, [3, 9])
    params = sample(ENDS=(2,))
    assert (params.end_id, params.stop_token_ids) == (2, None)


def test_without_ends_only_the_request_s_own_stop_it(sample: Sample) -> None:
    for given in ({"ignore_eos": True}, {"ENDS": ()}):
        params = sample(stop_token_ids=(9,), **given)
        assert (params.end_id, params.stop_token_ids, params.ignore_eos) == (-1, [9], False)
        assert params.pad_id >= 0


def test_log_probabilities(sample: Sample, flavour: str) -> None:
    params = sample(logprobs=1, prompt_logprobs=2)
    assert (params.logprobs, params.prompt_logprobs) == (1, 2)
    assert sample(logprobs=0).logprobs == 1, "TRTLLMSampler returns nothing for 0"
    own = 0 if flavour == "1.3.0" else 1
    params = sample(logprobs=0, prompt_logprobs=0, SAMPLER=SamplerKind.TORCH)
    assert (params.logprobs, params.prompt_logprobs) == (own, own)
    assert sample(prompt_logprobs=2, RESUMED=[8]).prompt_logprobs is None, "they went out before"


def test_biases_are_a_tensor_over_the_vocabulary(sample: Sample) -> None:
    bias = list(map(float, sample(logit_bias={1: 2.5, 15: -100.0}).embedding_bias))
    assert len(bias) == VOCABULARY
    assert {i: each for i, each in enumerate(bias) if each} == {1: 2.5, 15: -100.0}


def test_other_tokens_than_the_allowed_are_banned_by_the_tensor(sample: Sample) -> None:
    bias = list(map(float, sample(allowed_token_ids=(1, 3), logit_bias={3: 2.0, 5: 9.0}).embedding_bias))
    assert {i: each for i, each in enumerate(bias) if each != -math.inf} == {1: 0.0, 3: 2.0}


def test_bad_words_of_one_token(sample: Sample) -> None:
    params = sample(bad_words=((4,), (9,)))
    assert (params.bad_token_ids, params.embedding_bias) == ([4, 9], None)
    error = refusal(sample, bad_words=((4,), (5, 6)))
    assert (error.code, error.param) == (ErrorCode.INVALID, "bad_words")
    assert "one token each" in error.message and "has the tokens 5, 6;" in error.message


@ONLY_1_4
def test_bad_words_of_several_tokens_are_lists_where_the_version_takes_them(sample: Sample) -> None:
    assert sample(bad_words=((4,), (5, 6)), SAMPLER=SamplerKind.TORCH).bad_token_ids == [4, [5, 6]]


def test_a_sampler_without_bad_words_gets_them_as_biases(sample: Sample) -> None:
    params = sample(bad_words=((4,),), logit_bias={1: 1.0}, SAMPLER=SamplerKind.TORCH, VERSION=Version("1.3.0rc5"))
    assert params.bad_token_ids is None
    bias = list(map(float, params.embedding_bias))
    assert (bias[4], bias[1], bias[0]) == (-math.inf, 1.0, 0.0)


def test_a_seed_that_would_be_ignored_is_not_given(sample: Sample) -> None:
    assert sample(SAMPLER=SamplerKind.TORCH, VERSION=Version("1.3.0rc5"), seed=4).seed is None
    assert sample(SAMPLER=SamplerKind.TORCH, VERSION=Version("1.3.0"), seed=4).seed == 4


def test_more_log_probabilities_than_the_sampler_returns_are_refused(sample: Sample) -> None:
    error = refusal(sample, logprobs=3)
    assert (error.code, error.param) == (ErrorCode.INVALID, "logprobs")


def test_a_filter_that_it_does_not_have_is_refused(sample: Sample) -> None:
    error = refusal(sample, typical_p=0.9)
    assert (error.code, error.param) == (ErrorCode.INVALID, "typical_p")


def test_a_beam_search(sample: Sample) -> None:
    params = sample(beam_width=4, length_penalty=0.5, early_stopping=0, beam_search_diversity_rate=0.1)
    assert (params.use_beam_search, params.best_of, params.n) == (True, 4, 1)
    assert (params.length_penalty, params.early_stopping, params.beam_search_diversity_rate) == (0.5, 0, 0.1)
    assert (params.top_k, params.top_p) == (None, None)
    assert sample(beam_width=4, temperature=0.0).temperature is None


def test_fields_of_this_runtime_alone(sample: Sample) -> None:
    given = {"no_repeat_ngram_size": 3, "top_p_min": 0.1, "top_p_decay": 0.9, "top_p_reset_ids": 7}
    params = sample(**given)
    assert {name: getattr(params, name) for name in given} == given


def test_after_a_resume_less_is_left(sample: Sample) -> None:
    params = sample(max_tokens=10, min_tokens=5, RESUMED=[8, 9, 10])
    assert (params.max_tokens, params.min_tokens) == (7, 2)
    assert sample(max_tokens=10, min_tokens=2, RESUMED=[8, 9, 10]).min_tokens is None


def test_what_the_library_refuses_is_the_request_s_fault(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(params: Any) -> None:
        raise ValueError("require top_p <= 1")

    monkeypatch.setattr(load_library().llmapi.SamplingParams, "_validate", refuse)
    error = refusal(sample)
    assert error.code is ErrorCode.INVALID and "refuses the sampling parameters: require top_p <= 1" in error.message


# -- grammars


def guided(sample: Sample, backend: str, kind: GrammarKind, text: str = "") -> dict[str, Any]:
    made = sample(grammar=Grammar(kind, text), BACKEND=backend).guided_decoding
    fields = {name: getattr(made, name) for name in ("json", "regex", "grammar", "json_object", "structural_tag")}
    return {name: value for name, value in fields.items() if value}


@pytest.mark.parametrize("backend", BACKENDS)
def test_languages_that_both_backends_read(sample: Sample, backend: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert guided(sample, backend, GrammarKind.JSON_SCHEMA, schema) == {"json": schema}
    assert guided(sample, backend, GrammarKind.JSON_OBJECT) == {"json_object": True}
    assert guided(sample, backend, GrammarKind.REGEX, r"\d+") == {"regex": r"\d+"}
    kinds = set(GrammarKind) if backend == "llguidance" else set(GrammarKind) - {GrammarKind.TOOL_CALLS}
    assert set(grammar_kinds(backend)) == kinds


def test_a_choice_is_a_grammar(sample: Sample) -> None:
    text = json.dumps(["yes", 'a"b', "é\n", "😀", "yes"])
    assert guided(sample, "xgrammar", GrammarKind.CHOICE, text) == {
        "grammar": r'root ::= "yes" | "a\u0022b" | "\u00e9\u000a" | "\U0001f600"'
    }
    assert guided(sample, "llguidance", GrammarKind.CHOICE, '["yes", "no"]') == {
        "grammar": 'start: CHOICE\nCHOICE: "yes" | "no"\n'
    }


def test_a_grammar_is_translated_where_the_backend_reads_another(sample: Sample) -> None:
    gbnf = 'root ::= "a" | "b"'
    assert guided(sample, "xgrammar", GrammarKind.EBNF, gbnf) == {"grammar": gbnf}
    assert "start: T0" in guided(sample, "llguidance", GrammarKind.EBNF, gbnf)["grammar"]
    lark = 'start: "a" | "b"'
    assert guided(sample, "llguidance", GrammarKind.EBNF, lark) == {"grammar": lark}
    error = refusal(sample, grammar=Grammar(GrammarKind.EBNF, lark), BACKEND="xgrammar")
    assert "reads GBNF" in error.message and "guided_decoding_backend=llguidance" in error.message


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.TOOL_CALLS, 'start: "a"'),
        Grammar(GrammarKind.REGEX, "a", 'start: "b" @answer'),
        Grammar(GrammarKind.JSON_OBJECT, whitespace=""),
    ],
)
def test_tool_calls_reasoning_and_white_space_need_llguidance(sample: Sample, grammar: Grammar) -> None:
    made = sample(grammar=grammar, BACKEND="llguidance").guided_decoding.grammar
    assert json.loads(made)["grammars"][0]["lark_grammar"].lstrip().startswith("start: ")
    assert "guided_decoding_backend=llguidance" in refusal(sample, grammar=grammar, BACKEND="xgrammar").message


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "the JSON schema"),
        (GrammarKind.CHOICE, "[]", "at least one string"),
        (GrammarKind.CHOICE, "[1]", "a JSON array of strings"),
        (GrammarKind.REGEX, "a" * 9000, "the grammar is too long: 9000 bytes; regex may have 8192"),
    ],
)
def test_grammars_that_are_no_grammars(sample: Sample, kind: GrammarKind, text: str, message: str) -> None:
    error = refusal(sample, grammar=Grammar(kind, text), BACKEND="xgrammar")
    assert (error.code, error.param) == (ErrorCode.INVALID, "grammar")
    assert message in error.message


def test_without_a_backend_there_are_no_grammars(sample: Sample) -> None:
    assert grammar_kinds(None) == ()
    error = refusal(sample, grammar=Grammar(GrammarKind.JSON_OBJECT))
    assert error.param == "grammar" and "guided_decoding_backend=xgrammar" in error.message


# -- budgets for the reasoning


@pytest.mark.parametrize(
    ("processor", "arguments", "words"),
    [
        (object(), {}, None),
        (object(), {"speculative_config": None}, None),
        (object(), {"speculative_config": object()}, "TensorRT-LLM keeps to none beside speculation"),
        (None, {}, "TensorRT-LLM 1.3.0rc5 has none, later versions of 1.3 do"),
    ],
)
def test_a_budget_needs_the_processor_and_no_speculation(
    processor: object, arguments: dict[str, Any], words: str | None
) -> None:
    library: Any = SimpleNamespace(version=Version("1.3.0rc5"), find=lambda name: processor)
    refusal = budget_refusal(arguments, library)
    expected = {} if words is None else {"thinking_token_budget": f"thinking_token_budget must be left out: {words}"}
    assert refusal == expected
