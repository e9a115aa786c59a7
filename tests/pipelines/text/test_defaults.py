from pathlib import Path

import pytest

from engine.types import SamplingParams
from pipelines.text.defaults import SamplingDefaults, load_sampling_defaults
from pipelines.text.types import SamplingOverrides
from sluice.errors import ErrorCode, SluiceError


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
    assert load(tmp_path, '{"do_sample": false, "temperature": 0.6}').temperature == 0.0
    assert load(tmp_path, '{"do_sample": null}').temperature == 1.0


@pytest.mark.parametrize("text", ["{", '{"top_k": "many"}', "[]"])
def test_a_broken_file_is_told_with_its_path(tmp_path: Path, text: str) -> None:
    with pytest.raises(SluiceError, match=r"generation_config\.json") as caught:
        load(tmp_path, text)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_what_the_client_sent_goes_before_the_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    sent = SamplingOverrides(temperature=0.0, seed=0, max_tokens=99, stop_token_ids=(3,), ignore_eos=True)
    assert defaults.resolve(sent, 5) == SamplingParams(
        max_tokens=5, temperature=0.0, top_k=20, seed=0, stop_token_ids=(3,), ignore_eos=True
    )


def test_every_sampling_field_can_be_sent() -> None:
    # Bad words are sent as strings, beside the stop strings.
    sent = {*SamplingOverrides.__struct_fields__, "bad_words"}
    assert sent == set(SamplingParams.__struct_fields__)
