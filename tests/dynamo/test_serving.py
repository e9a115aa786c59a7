"""Workers of ours under Dynamo's front end answer as `sluice serve` does."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.dynamo.conftest import PATIENCE_S, RILL, Deployment, running_deployment
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.paths import DYNAMO_BIN, ROOT
from tests.server_process import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.dynamo

QUESTIONS = ("Hello!", "What does CREATE INDEX do?", "What is a sequence?")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "max_tokens": 5},
    {"temperature": 1.0, "seed": 11, "top_p": 0.9, "max_tokens": 40},
    {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.3, "max_tokens": 40},
    {"temperature": 0, "extra_body": {"ignore_eos": True, "repetition_penalty": 1.2}, "max_tokens": 40},
    {"temperature": 0, "extra_body": {"min_tokens": 20}, "max_tokens": 40},
    {"temperature": 0, "extra_body": {"guided_choice": ["yes", "no"]}},
    {"temperature": 0, "extra_body": {"guided_regex": "[a-f]{3}[0-9]"}},
    {
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 60,
    },
]


def ours(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="unused", timeout=PATIENCE_S, max_retries=0)


def asked(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="rill", messages=messages, **fields)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_whole_and_streamed_answers_are_those_of_our_own_server(
    deployment: Deployment, server: ServerProcess, fields: dict[str, Any]
) -> None:
    for question in QUESTIONS:
        expected = asked(ours(server), question, **fields)
        whole = asked(deployment.client(), question, **fields)
        [choice], [wanted] = whole.choices, expected.choices
        assert choice.message.content == wanted.message.content
        assert choice.finish_reason == wanted.finish_reason
        assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
        assert whole.usage.completion_tokens == expected.usage.completion_tokens

        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(asked(deployment.client(), question, **fields, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == wanted.message.content
        reasons = {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices} - {None}
        assert reasons == {wanted.finish_reason}
        assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_a_stop_string_ends_the_answer(deployment: Deployment, server: ServerProcess) -> None:
    answers = [asked(client, "Hello!", temperature=0, stop=["help"]) for client in (deployment.client(), ours(server))]
    texts = {answer.choices[0].message.content for answer in answers}
    assert texts == {"Hello! How can I "}
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}


def test_log_probabilities_are_those_of_our_own_server(deployment: Deployment, server: ServerProcess) -> None:
    fields = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    answers = [asked(client, QUESTIONS[1], **fields) for client in (deployment.client(), ours(server))]
    theirs, wanted = ([*answer.choices[0].logprobs.content] for answer in answers)
    assert [each.token for each in theirs] == [each.token for each in wanted]
    assert [each.logprob for each in theirs] == pytest.approx([each.logprob for each in wanted], abs=1e-3)
    for each, other in zip(theirs, wanted, strict=True):
        assert {top.token for top in each.top_logprobs} == {top.token for top in other.top_logprobs}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n must be 1, got 2"),
        ({"max_tokens": 5000}, "so max_tokens may be at most"),
        ({"extra_body": {"nvext": {"max_thinking_tokens": 4}}}, "max_thinking_tokens is not supported"),
        ({"extra_body": {"guided_regex": "("}}, "regular expression"),
    ],
)
def test_what_is_not_supported_is_refused_with_our_words(
    deployment: Deployment, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked(deployment.client(), "Hello!", **fields)
    assert words in str(refused.value)


def test_a_client_that_goes_frees_its_sequence(dynamo: None, tmp_path: Path) -> None:
    """The answer would take the blocks of 30,000 tokens if it went on."""
    model = write_tiny_checkpoint(tmp_path / "tiny")
    folder = tmp_path / "deployment"
    folder.mkdir()
    with running_deployment(folder) as deployment:
        worker = deployment.add_worker("tiny", model)
        stream = deployment.client().completions.create(
            model="tiny", prompt="Once", max_tokens=30_000, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        wait_until(lambda: worker.used_blocks() > 0)
        stream.close()
        most = 0.0

        def is_free() -> bool:
            nonlocal most
            used = worker.used_blocks()
            most = max(most, used)
            return used == 0

        wait_until(is_free)
        assert most * 16 < 20_000
        answer = deployment.client().completions.create(model="tiny", prompt="Once", max_tokens=3, temperature=0)
        assert answer.choices[0].finish_reason == "length"


async def test_streams_go_on_when_a_worker_is_killed(dynamo: None, tmp_path: Path) -> None:
    num_streams, num_tokens = 12, 700
    with running_deployment(tmp_path) as deployment:
        workers = [deployment.add_worker(f"rill-{number}", RILL) for number in (1, 2)]
        fields: Any = {"model": "rill", "temperature": 0, "max_tokens": num_tokens, "extra_body": {"ignore_eos": True}}
        expected = deployment.client().completions.create(prompt="Once upon a time", **fields).choices[0].text
        started = [asyncio.Event() for _ in range(num_streams)]
        killed = asyncio.Event()

        async def read(client: openai.AsyncOpenAI, index: int) -> tuple[str, str | None]:
            text, reason = "", None
            stream = await client.completions.create(prompt="Once upon a time", stream=True, **fields)
            async for chunk in stream:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
                if text and not started[index].is_set():
                    started[index].set()
                    await killed.wait()
            return text, reason

        settings: Any = {"api_key": "unused", "timeout": PATIENCE_S, "max_retries": 0}
        async with openai.AsyncOpenAI(base_url=f"{deployment.base_url}/v1", **settings) as client:
            reading = [asyncio.create_task(read(client, index)) for index in range(num_streams)]
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(each.wait() for each in started))
            await asyncio.to_thread(workers[0].kill)
            killed.set()
            answers = await asyncio.gather(*reading)
        assert [reason for _, reason in answers] == ["length"] * num_streams
        assert {text for text, _ in answers} == {expected}


def test_a_worker_that_cannot_start_says_why(dynamo: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "architectures": ["Nonsense"]}')
    with running_deployment(tmp_path) as deployment:
        process = deployment.start("worker", "sluice", "dynamo-worker", str(tmp_path))
        assert process.wait(PATIENCE_S) == 1
        assert "sluice dynamo-worker: error: " in (tmp_path / "worker").read_text()


def test_every_error_has_an_exception(dynamo: None) -> None:
    """The table names Dynamo's exceptions, and so needs its Python."""
    script = "from sluice.gateway.dynamo.worker import ERRORS, ErrorCode; assert ERRORS.keys() == {*ErrorCode}"
    command = [str(DYNAMO_BIN / "python"), "-c", script]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_S)
