"""`sluice.LLM` with the bundled model: its answers are the server's, its errors name the field, its engine ends."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sluice import LLM, ErrorCode, SamplingParams, SluiceError
from tests.gateway.fake_hub import fake_hub
from tests.paths import MODELS, ROOT
from tests.server_process import MODEL, running_server
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon a time", "The sea"]
MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # In bf16 a batch may be answered otherwise than its prompts alone, on torch.
    with LLM(num_threads=1, max_num_seqs=4, max_queued_requests=4, dtype="f32") as llm:
        yield llm


def refusal(call: Callable[[], object]) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        call()
    return caught.value


def test_the_answers_are_those_of_the_server(llm: LLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "stop": " the"}
    with running_server(MODELS / "rill" / "1", tmp_path / "log", "--dtype=f32") as server:
        server.wait_ready()
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
            completion = client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPTS, **options}).json()
            chat = client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "temperature": 0}
            ).json()
    outputs = llm.generate(PROMPTS, **options)
    assert [(each.text, each.finish_reason) for each in outputs] == [
        (choice["text"], choice["finish_reason"]) for choice in completion["choices"]
    ]
    assert sum(len(each.token_ids) for each in outputs) == completion["usage"]["completion_tokens"]
    answer, choice = llm.chat(MESSAGES, temperature=0), chat["choices"][0]
    assert (answer.text, answer.finish_reason) == (choice["message"]["content"], choice["finish_reason"])
    assert len(answer.prompt_token_ids) == chat["usage"]["prompt_tokens"]


def test_one_prompt_has_one_output_and_several_have_a_list_in_their_order(llm: LLM) -> None:
    one = llm.generate(PROMPTS[0], max_tokens=4, temperature=0)
    assert (one.prompt, len(one.token_ids), one.finish_reason) == (PROMPTS[0], 4, "length")
    assert one.outputs[0].token_ids == one.token_ids
    several = llm.generate(PROMPTS, max_tokens=4, temperature=0)
    assert [each.prompt for each in several] == PROMPTS
    assert several[0].outputs == one.outputs
    same = llm.generate([each.prompt_token_ids for each in several], max_tokens=4, temperature=0)
    assert [each.token_ids for each in same] == [each.token_ids for each in several]
    assert [each.text for each in llm.chat([MESSAGES, MESSAGES], temperature=0)] == ["Hello! How can I help you?"] * 2


def test_sampling_params_are_taken_and_names_beside_them_win(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)
    output = llm.generate("Hello", params).outputs[0]
    assert output.logprobs is not None
    assert [entry.token.token_id for entry in output.logprobs] == output.token_ids
    assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert len(llm.generate("Hello", params, max_tokens=5).token_ids) == 5
    assert len(llm.generate("Hello", ignore_eos=True).token_ids) == 16


def test_more_prompts_than_the_queue_holds_from_several_threads(llm: LLM) -> None:
    def count(_: int) -> int:
        return len(llm.generate(["Hello"] * 20, max_tokens=2))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(count, range(3))) == [20, 20, 20]


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (
            lambda llm: llm.generate("a", temprature=1),
            "temprature",
            "temprature is no sampling field; those",
        ),
        (
            lambda llm: llm.generate("a", temperature="x"),
            "temperature",
            "temperature: Expected `float`, got `str`",
        ),
        (lambda llm: llm.generate("a", temperature=-1), "temperature", "temperature must be between 0 and 2, got -1"),
        (lambda llm: llm.generate("a", stop=3), "stop", "stop must be a string or several, got 3"),
        (lambda llm: llm.generate(["a", 3]), "prompts", "prompts[1] must be text or a list of token ids, got 3"),
        (lambda llm: llm.generate("a " * 9000), "prompt", "the prompt has 9001 tokens, but this model's context is"),
        (lambda llm: llm.chat([{"role": "user"}]), "messages", "messages: Object missing required field `content`"),
        (
            lambda llm: llm.generate("a", SamplingParams(bad_words=((1,),))),
            "bad_words",
            "bad_words of SamplingParams are token ids; give bad_words by name, as strings",
        ),
        (
            lambda _: LLM("nowhere"),
            "model",
            "model must be the folder of a HuggingFace checkpoint or OpenVINO IR, or ORG/NAME on the Hugging Face hub, "
            "got 'nowhere', which is no folder",
        ),
        (lambda _: LLM(max_num_seq=3), "max_num_seq", "max_num_seq is no engine option; those there are: model_path"),
    ],
)
def test_errors_name_the_field(llm: LLM, call: Callable[[LLM], object], param: str, message: str) -> None:
    error = refusal(lambda: call(llm))
    assert (error.code, error.param) == (ErrorCode.INVALID, param)
    assert error.message.startswith(message)


def engine_pid(llm: LLM) -> int:
    engine = llm._engine._engine
    assert engine is not None and engine.pid is not None
    return engine.pid


def test_a_model_s_folder_in_a_repository_is_loaded_and_closing_ends_the_engine() -> None:
    llm = LLM(MODELS / "rill", num_threads=1)
    pid = engine_pid(llm)
    assert llm.generate("Hello", max_tokens=1).token_ids
    llm.close()
    llm.close()
    assert not psutil.pid_exists(pid)
    error = refusal(lambda: llm.generate("Hello"))
    assert (error.code, error.message) == (ErrorCode.UNAVAILABLE, "this LLM is closed")


def test_the_bundled_model_is_loaded_by_its_name_and_the_last_reference_ends_its_engine() -> None:
    llm = LLM("rill", num_threads=1)
    pid = engine_pid(llm)
    assert llm.generate("Hello", max_tokens=1).token_ids
    del llm
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_a_model_of_the_hub_is_downloaded_and_the_interpreter_s_end_ends_its_engine(tmp_path: Path) -> None:
    version = MODELS / "rill" / "1"
    files = {each.name: each.read_bytes() for each in version.iterdir() if each.is_file()}
    script = (
        "from sluice import LLM\nllm = LLM('acme/tiny', num_threads=1)\n"
        "print(llm._engine._engine.pid, llm.generate('Hello', max_tokens=1).token_ids)"
    )
    with fake_hub({"acme/tiny": files}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}  # noqa: TID251 - the child's
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    found = re.fullmatch(r"(\d+) \[\d+\]\n", done.stdout)
    assert found and "Traceback" not in done.stderr, done.stderr
    assert not psutil.pid_exists(int(found[1]))
