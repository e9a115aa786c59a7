"""Answers of the vLLM runtime: equal to vLLM's own, and to ours where both must be."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
import zmq

from tests.gateway.front.http.sse import events_of
from tests.server_process import ServerProcess, running_command
from tests.vllm.adapters import merge
from tests.vllm.conftest import ADAPTERS, LONG, MAX_TOKENS, PATIENCE_S, PROMPTS, RILL, complete, metric
from tests.waiting import wait_for, wait_until

pytestmark = pytest.mark.vllm
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
NOBODY = {"additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    **NOBODY,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                **NOBODY,
            },
        },
    }
]
GUIDED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": r"[a-f]{4}-\d{2}"}},
    {"structured_outputs": {"choice": ["left", "right"]}},
    {"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z")+ "."'}},
    {"tools": TOOLS, "tool_choice": "required"},
]


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model on our own executor."""
    with running_command(tmp_path_factory.mktemp("log") / "ours", str(RILL), "--dtype=f32") as server:
        server.wait_ready()
        yield server


def test_tokens_are_vllms_own_alone_and_together(server: ServerProcess, plain: dict[str, Any]) -> None:
    alone = [ids(complete(server, prompt, max_tokens=MAX_TOKENS)) for prompt in PROMPTS[:4]]
    assert alone == plain["alone"]["token_ids"]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = [*pool.map(lambda prompt: ids(complete(server, prompt, max_tokens=MAX_TOKENS)), PROMPTS)]
    assert together == plain["together"]["token_ids"]


def test_tokens_are_our_executors(server: ServerProcess, ours: ServerProcess) -> None:
    for prompt in PROMPTS[::8]:
        assert ids(complete(server, prompt, max_tokens=24)) == ids(complete(ours, prompt, max_tokens=24))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"logprobs": 2}])
def test_what_is_streamed_equals_what_is_not(server: ServerProcess, sampling: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        request: dict[str, Any] = {
            "model": "rill", "prompt": "The tar command", "max_tokens": 30, "temperature": 0, **sampling
        }  # fmt: skip
        whole = client.completions.create(**request).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    if whole.logprobs is not None:
        parts = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs or []]
        assert parts == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("constraint", GUIDED, ids=lambda fields: next(iter(fields)))
def test_guided_output_is_ours(server: ServerProcess, ours: ServerProcess, constraint: dict[str, Any]) -> None:
    body = {"model": "rill", "messages": [{"role": "user", "content": "Say something about Paris."}], "max_tokens": 80}
    answers = [
        httpx.post(f"{each.base_url}/v1/chat/completions", json={**body, "temperature": 0, **constraint}, timeout=60)
        for each in (server, ours)
    ]
    messages = [answer.json()["choices"][0]["message"] for answer in answers]
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = ""
    assert messages[0] == messages[1]


def test_log_probabilities_are_ours(server: ServerProcess, ours: ServerProcess) -> None:
    request: dict[str, Any] = {"max_tokens": 4, "logprobs": 3, "prompt_logprobs": 1}
    theirs, own = (complete(each, PROMPTS[0], **request)["choices"][0] for each in (server, ours))
    for name in ("token_logprobs", "tokens"):
        assert theirs["logprobs"][name] == pytest.approx(own["logprobs"][name], abs=1e-3)
    for entry, expected in zip(theirs["prompt_logprobs"], own["prompt_logprobs"], strict=True):
        assert (entry is None) is (expected is None)
        if entry is not None:
            for token_id, found in expected.items():
                assert entry[token_id]["logprob"] == pytest.approx(found["logprob"], abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [1, 99999]}, "token ids of the prompt must be between 0 and 4095, got 99999"),
        ({"typical_p": 0.5}, "typical_p must be 1"),
        ({"structured_outputs": {"regex": "(["}}, "the regular expression"),
        ({"structured_outputs": {"json": {"type": "objec"}}}, "the grammar cannot be used"),
        ({"max_tokens": 5000}, "context is 1024"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"model": "rill:nobody"}, "nobody"),
    ],
)
def test_a_bad_request_is_refused_and_hurts_nobody(server: ServerProcess, fields: dict[str, Any], words: str) -> None:
    body = {"model": "rill", "prompt": [1, 5], "max_tokens": 4, **fields}
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
    assert response.status_code in (400, 404), response.text
    assert words in response.json()["error"]["message"]
    assert len(ids(complete(server, [1, 5], max_tokens=4))) == 4


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess) -> None:
    num_before = metric(server, "sluice_engine_generation_tokens_total")
    body = {"model": "rill", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with frozen(server):  # else a fast machine has generated all of it before the client leaves
        client = HTTPConnection(server.base_url.removeprefix("http://"))
        client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        wait_until(lambda: metric(server, "sluice_kv_blocks_reserved") > 0)
        client.close()
        wait_until(lambda: metric(server, "sluice_open_requests") == 0)
    wait_until(lambda: metric(server, "sluice_kv_blocks_reserved") + metric(server, "sluice_sequences_running") == 0)
    assert metric(server, "sluice_engine_generation_tokens_total") - num_before < 900


def test_adapters_answer_as_merged_weights_do(server: ServerProcess, adapters: dict[str, Path], tmp_path: Path) -> None:
    def ask(name: str) -> list[list[int]]:
        return [ids(complete(server, prompt, name, max_tokens=16)) for prompt in PROMPTS[:4]]

    with ThreadPoolExecutor(3) as pool:  # all in the same steps
        names = {"": "rill"} | {each: f"rill:{each}" for each in ADAPTERS}
        answers = dict(zip(names, pool.map(ask, names.values()), strict=True))
    assert answers["loud"] != answers["quiet"] != answers[""]
    for name, folder in adapters.items():
        merged = merge(RILL, folder, tmp_path / name)
        with running_command(tmp_path / f"{name}.log", str(merged), "--dtype=f32") as other:
            other.wait_ready()
            expected = [ids(complete(other, prompt, name, max_tokens=16)) for prompt in PROMPTS[:4]]
        assert answers[name] == expected


def test_adapters_come_and_go(server: ServerProcess, adapters: dict[str, Path]) -> None:
    def change(action: str, **body: Any) -> int:
        response = httpx.post(f"{server.base_url}/v1/{action}_lora_adapter", json=body, timeout=60)
        return response.status_code

    loud, quiet = (ids(complete(server, PROMPTS[0], f"rill:{name}", max_tokens=16)) for name in ADAPTERS)
    assert change("load", lora_name="third", lora_path=str(adapters["loud"])) == 200
    assert ids(complete(server, PROMPTS[0], "rill:third", max_tokens=16)) == loud
    assert change("load", lora_name="third", lora_path=str(adapters["quiet"]), load_inplace=True) == 200
    assert ids(complete(server, PROMPTS[0], "rill:third", max_tokens=16)) == quiet
    assert change("load", lora_name="fourth", lora_path="/nowhere") == 404
    assert change("unload", lora_name="third") == 200
    body = {"model": "rill:third", "prompt": "x"}
    assert httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60).status_code == 404


def test_v2_generates(server: ServerProcess) -> None:
    body = {"text_input": "The tar command", "max_tokens": 8, "temperature": 0.0}
    answer = httpx.post(f"{server.base_url}/v2/models/rill/generate", json=body, timeout=60).json()
    with httpx.stream(
        "POST", f"{server.base_url}/v2/models/rill/generate_stream", json={**body, "stream": True}, timeout=60
    ) as response:
        events = [json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data:")]
    assert "".join(event["text_output"] for event in events) == answer["text_output"]
    with grpcclient.InferenceServerClient(server.grpc_address) as client:
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"The tar command"], np.object_))
        count = grpcclient.InferInput("max_tokens", [1], "INT32")
        count.set_data_from_numpy(np.array([8], np.int32))
        result = client.infer("rill", [text, count])
    assert result.as_numpy("text_output").item().decode() == answer["text_output"]


def test_vllms_clients_read_all_three_steps(
    server: ServerProcess, read_by_vllm: Callable[[dict[str, list[Any]]], Any]
) -> None:
    messages = [{"role": "user", "content": "What is a block table?"}]
    body = {"model": "rill", "messages": messages, "max_tokens": 12, "temperature": 0, "logprobs": True}

    def ok(path: str, sent: Any) -> Any:
        answer = httpx.post(f"{server.base_url}{path}", json=sent, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    rendered = ok(f"{CHAT}/render", body)
    generated = ok(GENERATE, rendered)
    streamed = httpx.post(f"{server.base_url}{GENERATE}", json=rendered | {"stream": True}, timeout=60)
    derendered = ok(f"{CHAT}/derender", {"generate_response": generated, "chat_request": body})
    assert derendered["choices"] == ok(CHAT, body)["choices"]
    answers = {
        "GenerateRequest": [rendered],
        "GenerateTokensResponse": [generated],
        "GenerateTokensStreamResponse": events_of(streamed.content)[:-1],
        "ChatCompletionResponse": [derendered],
    }
    again = ok(GENERATE, read_by_vllm(answers)["GenerateRequest"][0])
    assert again["choices"] == generated["choices"]


def test_events_of_the_kv_cache_are_published(server: ServerProcess, kv_events: str) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(kv_events)
        subscriber.subscribe("kv")
        for number in range(30):  # what comes before a subscriber is known does not reach it
            prompt = [100 + number] * 300
            complete(server, prompt, max_tokens=1)
            if subscriber.poll(1000):
                break
        topic, _, payload = subscriber.recv_multipart(zmq.NOBLOCK)
    _, events, *_ = msgspec.msgpack.decode(payload)
    stored = next(event for event in events if event["type"] == "BlockStored")
    assert topic == b"kv"
    assert stored["token_ids"] == prompt[: len(stored["token_ids"])] != []


def test_prompts_in_the_cache_count_as_on_our_executor(server: ServerProcess) -> None:
    def answer() -> int:
        usage = complete(server, [50] * 300, max_tokens=1)["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    def counts() -> list[float]:
        return [metric(server, f"sluice_engine_{kind}_tokens_total") for kind in ("cached", "prompt")]

    assert answer() == 0
    before = counts()
    num_cached = answer()
    assert 0 < num_cached < 300
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [num_cached, 300 - num_cached]


def test_overload_preempts_vllm_and_not_us(small_server: ServerProcess, plain: dict[str, Any]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [*pool.map(lambda prompt: ids(complete(small_server, prompt, max_tokens=LONG)), PROMPTS)]
    assert answers == plain["overload"]["token_ids"]
    assert plain["overload"]["preemptions"] > 0
    assert metric(small_server, "sluice_engine_preemptions_total") == 0


def test_a_sleep_waits_for_what_has_begun(server: ServerProcess) -> None:
    expected = ids(complete(server, PROMPTS[0], max_tokens=900))
    num_before = metric(server, "sluice_engine_generation_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(stream_to_end, server, PROMPTS[0], max_tokens=900)
        wait_until(lambda: metric(server, "sluice_engine_generation_tokens_total") > num_before)
        assert call(server, "/sleep?level=1&mode=wait") == {"status": "sleeping", "level": 1}
        assert metric(server, "sluice_sequences_running") == 0
        assert early.result(PATIENCE_S) == expected
    assert call(server, "/wake_up") == {"status": "awake", "tags": None}


def test_requests_outlive_a_sleep(server: ServerProcess) -> None:
    expected = ids(complete(server, PROMPTS[0], max_tokens=900))
    with ThreadPoolExecutor(4) as pool:
        with frozen(server):
            early = pool.submit(stream_to_end, server, PROMPTS[0], max_tokens=900)
            wait_until(lambda: metric(server, "sluice_sequences_running") == 1)
            sleep = pool.submit(call, server, "/sleep?level=1&mode=keep")
            # A further request is behind the sleep in the engine's queue, or came before it and runs.
            pool.submit(complete, server, PROMPTS[1], max_tokens=1)
            num_running, num_waiting = wait_for(lambda: sequences(server), lambda found: sum(found) == 2)
        assert sleep.result(PATIENCE_S) == {"status": "sleeping", "level": 1}
        assert sequences(server) == (num_running, num_waiting)
        assert call(server, "/is_sleeping", "GET") == {"is_sleeping": True}
        assert httpx.get(f"{server.base_url}/health").status_code == 503
        late = pool.submit(complete, server, PROMPTS[0], max_tokens=900)
        wait_until(lambda: sequences(server) == (num_running, num_waiting + 1))
        assert not early.done()
        assert call(server, "/wake_up") == {"status": "awake", "tags": None}
        assert early.result(PATIENCE_S) == ids(late.result(PATIENCE_S)) == expected
    assert httpx.get(f"{server.base_url}/health").status_code == 200


def test_a_sleep_that_aborts_says_so(server: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        with frozen(server):
            early = pool.submit(stream_to_end, server, PROMPTS[0], max_tokens=900)
            wait_until(lambda: metric(server, "sluice_sequences_running") == 1)
            sleep = pool.submit(call, server, "/sleep?mode=abort")
            with pytest.raises(AssertionError, match="the engine was put to sleep"):
                early.result(PATIENCE_S)
        assert sleep.result(PATIENCE_S)["status"] == "sleeping"
    assert call(server, "/wake_up?tags=weights&tags=kv_cache")["status"] == "awake"
    assert ids(complete(server, PROMPTS[0], max_tokens=3))


@contextmanager
def frozen(server: ServerProcess) -> Iterator[None]:
    """vLLM's own processes stand still, so that what is sent meanwhile reaches them before their next step."""
    cores = server.engine().children(recursive=True)
    assert cores
    for each in cores:
        each.suspend()
    try:
        yield
    finally:
        for each in cores:
            each.resume()


def sequences(server: ServerProcess) -> tuple[float, float]:
    """Return how many sequences run, and how many wait."""
    return metric(server, "sluice_sequences_running"), metric(server, "sluice_sequences_waiting")


def call(server: ServerProcess, path: str, method: str = "POST") -> dict[str, Any]:
    response = httpx.request(method, f"{server.base_url}{path}", timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return dict(response.json())


def stream_to_end(server: ServerProcess, prompt: list[int], **fields: Any) -> list[int]:
    """Return the token ids of a stream."""
    body = {"model": "rill", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        events = (token_ids(line) for line in response.iter_lines() if line and not line.endswith("[DONE]"))
        return [*chain.from_iterable(events)]


def token_ids(line: str) -> list[int]:
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event["error"]["message"]
    return list(event["choices"][0]["token_ids"])


# The last of the file: the engine starts again.
def test_streams_go_on_when_the_engine_is_killed(server: ServerProcess) -> None:
    def request(number: int) -> dict[str, Any]:
        odd = {"temperature": 1.0, "seed": number, "presence_penalty": 0.5}
        return {"max_tokens": 200, **(odd if number % 2 else {})}

    def answer(number: int) -> str:
        return str(complete(server, f"Story {number}:", **request(number))["choices"][0]["text"])

    def stream(number: int) -> str:
        body = {"model": "rill", "prompt": f"Story {number}:", "temperature": 0, "ignore_eos": True, "stream": True}
        texts = []
        with httpx.stream(
            "POST", f"{server.base_url}/v1/completions", json={**body, **request(number)}, timeout=PATIENCE_S
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
                    seen.append(number)
        return "".join(texts)

    seen: list[int] = []
    with ThreadPoolExecutor(32) as pool:
        undisturbed = [*pool.map(answer, range(32))]
        streams = [pool.submit(stream, number) for number in range(32)]
        while len({*seen}) < 16:
            assert not all(each.done() for each in streams)
            time.sleep(0.01)
        server.engine().kill()
        texts = [each.result() for each in streams]
    assert texts == undisturbed
