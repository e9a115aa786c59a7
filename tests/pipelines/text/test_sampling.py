from pathlib import Path
from typing import Any

import pytest

from sluice.engine.sampling_fields import OPTIONAL_FIELDS, SAMPLING_FIELDS
from sluice.engine.types import SamplingParams
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.sampling import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    SamplingDefaults,
    drop_neutral_fields,
    load_sampling_defaults,
    tokenize_bad_words,
)
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import SamplingOverrides


def load(folder: Path, text: str) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(text)
    return load_sampling_defaults(folder)


def test_a_checkpoint_without_the_file_has_openai_defaults(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path).resolve(SamplingOverrides(), 5) == SamplingParams(max_tokens=5)


def test_fields_are_read_and_others_ignored(tmp_path: Path) -> None:
    text = """{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null,
               "repetition_penalty": 1.05, "eos_token_id": [1, 2], "transformers_version": "5.0.0"}"""
    assert load(tmp_path, text) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)


def test_no_sampling_means_greedy(tmp_path: Path) -> None:
    assert load(tmp_path, '{"do_sample": false, "temperature": 0.6}')["temperature"] == 0.0
    assert load(tmp_path, '{"do_sample": null}').resolve({}, 5).temperature == 1.0


@pytest.mark.parametrize("text", ["{", '{"top_k": "many"}', "[]"])
def test_the_error_of_a_broken_file_has_its_path(tmp_path: Path, text: str) -> None:
    with pytest.raises(SluiceError, match=r"generation_config\.json") as caught:
        load(tmp_path, text)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_what_the_client_sent_goes_before_the_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    sent = SamplingOverrides(temperature=0.0, seed=0, max_tokens=99, stop_token_ids=(3,), ignore_eos=True)
    assert defaults.resolve(sent, 5) == SamplingParams(
        max_tokens=5, temperature=0.0, top_k=20, seed=0, stop_token_ids=(3,), ignore_eos=True
    )


ALL = OPTIONAL_FIELDS


def wanted(sent: dict[str, Any], has: tuple[str, ...]) -> dict[str, Any]:
    """Return what is left of `sent` for a runtime that has the optional fields `has`."""
    left = drop_neutral_fields(SamplingOverrides(max_tokens=5, **sent), has)
    assert left.pop("max_tokens") == 5
    return left


@pytest.mark.parametrize("has", [(), ALL])
@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_search_diversity_rate", 0.0), ("no_repeat_ngram_size", 0), ("top_p_min", 0.0), ("top_p_decay", 1.0)],
)
def test_values_that_are_off_are_always_dropped(name: str, value: float, has: tuple[str, ...]) -> None:
    assert wanted({name: value}, has) == {}


@pytest.mark.parametrize(
    "sent",
    [
        {"beam_width": 1},
        {"length_penalty": 1.0},
        {"length_penalty": 0.0},
        {"early_stopping": 1},
        {"top_p_reset_ids": 7},
    ],
)
def test_what_changes_nothing_is_kept_only_where_the_field_is(sent: dict[str, float]) -> None:
    assert wanted(sent, ()) == {}
    assert wanted(sent, ALL) == sent


@pytest.mark.parametrize("has", [(), ALL])
@pytest.mark.parametrize(
    "sent", [{"beam_width": 2}, {"length_penalty": 2.0}, {"top_p_min": 0.1}, {"no_repeat_ngram_size": 3}]
)
def test_what_asks_for_something_is_kept_for_the_engine_to_judge(sent: dict[str, float], has: tuple[str, ...]) -> None:
    assert wanted(sent, has) == sent


def test_a_zero_of_a_common_field_is_kept_over_the_models_default() -> None:
    sent = {name: each.off[0] for name, each in SAMPLING_FIELDS.items() if each.off and not each.is_optional}
    assert drop_neutral_fields(sent, ()) == sent


def test_a_word_is_spelled_with_and_without_a_space_before_it(rill: Tokenizer) -> None:
    spelled = tokenize_bad_words(rill, ("cat", "  cat"))
    assert spelled == (tuple(rill.encode_words("cat", "")), tuple(rill.encode_words(" cat", "")))
    assert spelled[0] != spelled[1]


@pytest.mark.parametrize("words", [("",), ("a", " "), ("a" * (MAX_BAD_WORD_LENGTH + 1),), ("a",) * (MAX_BAD_WORDS + 1)])
def test_words_and_their_number_have_limits(rill: Tokenizer, words: tuple[str, ...]) -> None:
    with pytest.raises(SluiceError) as caught:
        tokenize_bad_words(rill, words)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "bad_words")
