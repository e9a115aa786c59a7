"""The table of samplers, versions and fields, and what follows from it."""

from typing import Any

import pytest
from packaging.version import Version

from sluice.engine.delegated.tensorrt_llm.samplers import ROWS, ModelSampler, SamplerEffect, SamplerKind, is_one_model
from sluice.engine.types import SamplingParams
from tests.errors import error_of


def sampler(kind: SamplerKind, version: str, *arguments: str, beams: int = 1) -> ModelSampler:
    return ModelSampler(kind, Version(version), frozenset(arguments), beams)


def refused(kind: SamplerKind, version: str, *arguments: str) -> set[str]:
    return set(sampler(kind, version, *arguments).refusals)


def test_every_field_of_the_table_is_one_of_ours() -> None:
    assert {name for row in ROWS for name in row.fields} <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("version", ["1.3.0rc5", "1.3.0rc15.post1", "1.3.0rc23", "1.2.1"])
def test_a_release_candidate_is_older_than_the_one_that_obeys(version: str) -> None:
    names = refused(SamplerKind.TORCH, version)
    assert {"presence_penalty", "no_repeat_ngram_size", "min_p", "seed", "top_p_decay"} <= names


@pytest.mark.parametrize("version", ["1.3.0rc24", "1.3.0rc25+local"])
def test_a_field_is_obeyed_from_its_release_candidate_on(version: str) -> None:
    assert refused(SamplerKind.TORCH, version) == ({"seed"} if version == "1.3.0rc24" else set())


def test_bad_words_become_biases_where_the_sampler_has_those_alone() -> None:
    assert sampler(SamplerKind.TORCH, "1.2.1").bans_by_bias
    assert not sampler(SamplerKind.TORCH, "1.3.0").bans_by_bias
    assert not sampler(SamplerKind.ONE_MODEL, "1.3.0").bans_by_bias
    assert "bad_words" in refused(SamplerKind.ONE_MODEL, "1.3.0")


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc5", "1.3.0", "1.4.0"])
def test_speculation_by_one_model_never_has_what_edits_logits(version: str) -> None:
    names = refused(SamplerKind.ONE_MODEL, version)
    assert {"min_tokens", "logit_bias", "allowed_token_ids", "min_p", "logprobs", "prompt_logprobs"} <= names


def test_penalties_in_speculation_by_one_model_need_their_argument() -> None:
    assert "presence_penalty" in refused(SamplerKind.ONE_MODEL, "1.4.0")
    assert "presence_penalty" not in refused(SamplerKind.ONE_MODEL, "1.4.0", "speculative_config.enable_penalty")


@pytest.mark.parametrize(
    ("version", "arguments", "is_obeyed"),
    [("1.2.1", (), False), ("1.3.0rc5", ("speculative_config.allow_advanced_sampling",), True), ("1.3.0", (), True)],
)
def test_a_temperature_is_refused_where_speculation_is_greedy(
    version: str, arguments: tuple[str, ...], is_obeyed: bool
) -> None:
    chosen = sampler(SamplerKind.ONE_MODEL, version, *arguments)
    chosen.check(SamplingParams(temperature=0.0))
    if is_obeyed:
        chosen.check(SamplingParams(temperature=0.7))
    else:
        error = error_of(chosen.check, SamplingParams(temperature=0.7))
        assert error.param == "temperature" and "only temperature 0 is what it does" in error.message


def test_one_top_log_probability_comes_of_the_full_sampler() -> None:
    chosen = sampler(SamplerKind.TRTLLM, "1.2.1")
    chosen.check(SamplingParams(logprobs=1))
    error = error_of(chosen.check, SamplingParams(logprobs=2))
    assert error.message == (
        "logprobs above 1 cannot be used: the TRTLLMSampler of TensorRT-LLM 1.2.1 ignores it; start it with the "
        "setting sampler_type=TorchSampler, which returns several, got 2"
    )


@pytest.mark.parametrize(
    ("asked", "is_taken"),
    [
        ({"logprobs": 0, "beam_width": 4}, True),
        ({"logprobs": 1, "beam_width": 4}, False),
        ({"logprobs": 0, "beam_width": 1}, False),
        ({"beam_width": 1}, True),
    ],
)
def test_beams_have_the_log_probability_of_the_token_alone(asked: dict[str, Any], is_taken: bool) -> None:
    chosen = sampler(SamplerKind.TORCH, "1.3.0", beams=4)
    if is_taken:
        chosen.check(SamplingParams(**asked))
    else:
        assert error_of(chosen.check, SamplingParams(**asked)).param == "logprobs"


def test_a_refusal_names_field_sampler_version_and_what_to_do() -> None:
    assert sampler(SamplerKind.TORCH, "1.3.0rc5").refusals["min_p"] == (
        "min_p cannot be used: the TorchSampler of TensorRT-LLM 1.3.0rc5 ignores it; start the model without "
        "speculation and with the setting sampler_type=TRTLLMSampler, or use TensorRT-LLM 1.3.0rc24 or later"
    )
    assert sampler(SamplerKind.ONE_MODEL, "1.3.0").refusals["allowed_token_ids"] == (
        "allowed_token_ids cannot be used: speculation by one model in TensorRT-LLM 1.3.0 refuses it; "
        "start the model without speculation"
    )


def test_only_refusals_of_the_library_count_as_such() -> None:
    effects = {version: ROWS[-3].effect(Version(version), ()) for version in ("1.2.1", "1.3.0")}
    assert effects == {"1.2.1": SamplerEffect.IGNORED, "1.3.0": SamplerEffect.REFUSED}


def test_the_types_of_speculation_that_run_in_the_model() -> None:
    new, old = Version("1.3.0"), Version("1.2.1")
    assert is_one_model("MTP", old) and is_one_model("Eagle3", new) and is_one_model("Draft_Target", new)
    assert not is_one_model("NGram", new) and not is_one_model("Draft_Target", old)
    assert not is_one_model("Eagle", old, may_be_two=True) and is_one_model("Eagle3", new, may_be_two=True)
