"""Every protocol of a language model: a neutral request becomes its wire form, and its answer a neutral one."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from tests.gateway.answering import summed, tensors
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.gateway.front.http.sse import events_of
from tests.waiting import PATIENCE_S

QUESTION = "What is a block table? Say it in a few words, for a reader who has never seen one, and then name its parts."
"""Longer than a block of the cache, so that answers have cached tokens to count."""
TURNS = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Served:
    """A server, with the gRPC port's stub and the text that QUESTION is to the model, with the template's tags."""

    live: LiveServer
    stub: Any
    prompt: str
    prompt_ids: Sequence[int]
    datatypes: dict[str, str]
    """The model's input tensors, by their names."""

    def echo(self, num_tokens: int) -> str:
        return self.live.echo(list(self.prompt_ids), num_tokens)


@dataclass(frozen=True)
class Answer:
    """An answer in neutral terms. Where a protocol tells no count or no log probabilities, the field is None."""

    texts: tuple[str, ...]
    finish: str
    num_prompt: int | None = None
    num_tokens: int | None = None
    logprobs: tuple[float, ...] | None = None
    stop: str | int | None = None
    """The stop string or token that ended the text, where the protocol names it."""
    warning: str = ""


@dataclass(frozen=True)
class Refusal:
    """A refusal in neutral terms."""

    status: int | str
    message: str
    param: str | None = None
    can_retry: bool = False

    def names(self, field: str) -> bool:
        return field in self.message or (self.param or "").startswith(field)


COLUMNS = ("chat", "completions", "responses", "messages", "ollama", "v2")
SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty")
NAMES: dict[str, tuple[str | None, ...]] = {
    **{name: (name, name, name, name, f"options.{name}", name) for name in SAME},
    "repetition_penalty": (*["repetition_penalty"] * 4, "options.repeat_penalty", "repetition_penalty"),
    "max_tokens": ("max_tokens", "max_tokens", "max_output_tokens", "max_tokens", "options.num_predict", "max_tokens"),
    "stop": ("stop", "stop", "stop", "stop_sequences", "options.stop", "stop_words"),
    "stop_token_ids": (*["stop_token_ids"] * 4, None, None),
    "bad_words": (*["bad_words"] * 4, None, "bad_words"),
    "min_tokens": (*["min_tokens"] * 4, None, "min_tokens"),
    "ignore_eos": (*["ignore_eos"] * 4, None, "ignore_eos"),
    "logit_bias": (*["logit_bias"] * 4, None, None),
    "allowed_token_ids": (*["allowed_token_ids"] * 4, None, None),
    "logprobs": ("logprobs", "logprobs", "include", None, "logprobs", "return_log_probs"),
    "prompt_logprobs": ("prompt_logprobs", "prompt_logprobs", None, None, None, None),
    "n": ("n", "n", None, None, None, "num_return_sequences"),
    "priority": (*["priority"] * 4, None, "priority"),
    "cache_salt": ("cache_salt", "cache_salt", "cache_salt", None, None, "cache_salt"),
    "thinking_token_budget": ("thinking_token_budget", None, None, None, None, None),
    "prompt_cache_key": ("prompt_cache_key", "prompt_cache_key", "prompt_cache_key", None, None, None),
}
"""How each protocol spells a field. None: it has none, and what is sent under the neutral name is refused or told."""
LOGPROBS = {"completions": 0, "responses": ["message.output_text.logprobs"]}
"""How a protocol asks for the log probabilities of tokens, where that is not true."""


def name_of(field: str, column: str) -> str | None:
    return NAMES[field][COLUMNS.index(column)]


def spelled(fields: dict[str, Any], column: str) -> dict[str, Any]:
    """Return the fields by their names on the wire, those that the protocol lacks by their neutral ones."""
    wire: dict[str, Any] = {}
    for field, value in fields.items():
        known = field if field not in NAMES else name_of(field, column)
        name = known or (f"options.{field}" if column == "ollama" else field)
        sent = LOGPROBS.get(column, value) if field == "logprobs" and value is True else value
        if name.startswith("options."):
            wire.setdefault("options", {})[name.removeprefix("options.")] = sent
        else:
            wire[name] = sent
    return wire


Ask = Callable[[Served, dict[str, Any]], Answer | Refusal]


@dataclass(frozen=True)
class Runner:
    """One way to ask: a protocol, and whether the answer is streamed."""

    name: str
    column: str
    ask: Ask
    body: Callable[[Served, dict[str, Any]], tuple[str, dict[str, Any]]] | None = None
    """The path and body of its HTTP request; None for gRPC."""
    is_streamed: bool = False


def _refused(response: httpx.Response) -> Refusal:
    error = response.json()["error"]
    can_retry = "retry-after" in response.headers
    if isinstance(error, str):
        return Refusal(response.status_code, error, None, can_retry)
    return Refusal(response.status_code, error["message"], error.get("param"), can_retry)


def _failed(event: Any) -> Refusal:
    error = event["error"]
    return Refusal(200, error if isinstance(error, str) else error["message"])


def _chat(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": TURNS, **spelled(fields, "chat")}


def _completions(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": served.prompt, **spelled(fields, "completions")}


def _responses(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": QUESTION, "store": False, **spelled(fields, "responses")}


def _messages(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": TURNS, "max_tokens": 16, **spelled(fields, "messages")}


def _ollama_chat(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"messages": TURNS, **spelled(fields, "ollama")}


def _ollama_generate(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"prompt": QUESTION, **spelled(fields, "ollama")}


def _generate(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    body = {"text_input": served.prompt, **counts, **spelled(fields, "v2")}
    return f"/v2/models/{body.pop('model', MODEL)}/generate", body


def _generate_stream(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    path, body = _generate(served, fields)
    return f"{path}_stream", body


def _infer(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    path, body = _generate(served, fields)
    inputs, parameters = [], {}
    for name, value in body.items():
        if name in served.datatypes:
            data = value if isinstance(value, list) else [value]
            inputs.append({"name": name, "datatype": served.datatypes[name], "shape": [len(data)], "data": data})
        else:
            parameters[name] = value
    return path.replace("/generate", "/infer"), {"inputs": inputs, "parameters": parameters}


def _logprobs(found: Sequence[Any] | None) -> tuple[float, ...] | None:
    return None if not found else tuple(each["logprob"] for each in found)


def _read_chat(events: Sequence[Any]) -> Answer:
    texts: dict[int, str] = {}
    finish, stop, logprobs, usage = "", None, [], None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            said = choice.get("message") or choice.get("delta") or {}
            texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or choice.get("text") or "")
            finish, stop = choice["finish_reason"] or finish, choice.get("stop_reason") or stop
            told = choice["logprobs"] or {}
            logprobs += [each["logprob"] for each in told.get("content") or ()] + (told.get("token_logprobs") or [])
    assert usage is not None
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer(tuple(texts[index] for index in sorted(texts)), finish, *counts, tuple(logprobs) or None, stop)


def _read_response(events: Sequence[Any]) -> Answer:
    response = events[-1].get("response", events[-1])
    [item] = response["output"]
    [part] = item["content"]
    if len(events) > 1:
        pieces = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(pieces) == part["text"], "the pieces are not the text"
    finish = "length" if response["status"] == "incomplete" else "stop"
    usage = response["usage"]
    return Answer(
        (part["text"],), finish, usage["input_tokens"], usage["output_tokens"], _logprobs(part.get("logprobs"))
    )


def _read_message(events: Sequence[Any]) -> Answer:
    reasons = {"max_tokens": "length", "stop_sequence": "stop", "end_turn": "stop"}
    if len(events) == 1:
        [message] = events
        text, told, usage = "".join(block["text"] for block in message["content"]), message, message["usage"]
    else:
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        [end] = [event for event in events if event["type"] == "message_delta"]
        usage, told = events[0]["message"]["usage"] | end["usage"], end["delta"]
    num_prompt = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    reason, stop = reasons[told["stop_reason"]], told["stop_sequence"]
    return Answer((text,), reason, num_prompt, usage["output_tokens"], stop=stop)


def _read_ollama(lines: Sequence[Any]) -> Answer:
    text = "".join(line["message"]["content"] if "message" in line else line["response"] for line in lines)
    end, told = lines[-1], [entry for line in lines for entry in line.get("logprobs") or ()]
    return Answer((text,), end["done_reason"], end["prompt_eval_count"], end["eval_count"], _logprobs(told))


def _read_v2(answer: dict[str, Any]) -> Answer:
    def first(name: str) -> Any:
        value = answer.get(name)
        return value[0] if isinstance(value, list) else value

    text, logprobs = answer["text_output"], answer.get("output_log_probs")
    texts = (text,) if isinstance(text, str) else tuple(text)
    counts = first("num_input_tokens"), first("num_output_tokens")
    return Answer(texts, first("finish_reason"), *counts, None if logprobs is None else tuple(logprobs))


def _read_generated(events: Sequence[Any]) -> Answer:
    by_sequence: dict[int, list[Any]] = {}
    for event in events:
        by_sequence.setdefault(event.get("sequence_index", 0), []).append(event)
    answers = [_read_v2(summed(by_sequence[index])) for index in sorted(by_sequence)]
    texts = tuple(text for answer in answers for text in answer.texts)
    return Answer(texts, answers[0].finish, answers[0].num_prompt, answers[0].num_tokens, answers[0].logprobs)


def _read_infer(bodies: Sequence[Any]) -> Answer:
    return _read_v2({output["name"]: output["data"] for output in bodies[0]["outputs"]})


def _lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _sse(content: bytes) -> list[Any]:
    events = [block.split(b"data: ", 1)[1] for block in content.strip().split(b"\n\n") if b"data: " in block]
    return [json.loads(event) for event in events if event != b"[DONE]"]


def _over_http(
    body: Callable[[Served, dict[str, Any]], tuple[str, dict[str, Any]]],
    read: Callable[[Sequence[Any]], Answer],
    extra: dict[str, Any],
    split: Callable[[bytes], list[Any]] | None,
) -> tuple[Ask, Callable[[Served, dict[str, Any]], tuple[str, dict[str, Any]]]]:
    def sent(served: Served, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        path, made = body(served, fields)
        return path, made if path.startswith("/v2") else {"model": MODEL, **made, **extra}

    def ask(served: Served, fields: dict[str, Any]) -> Answer | Refusal:
        response = served.live.post(*sent(served, fields))
        if response.status_code != 200:
            return _refused(response)
        events = [response.json()] if split is None else split(response.content)
        for event in events:
            if event.get("type") == "response.failed":
                return _failed(event["response"])
            if event.get("error") is not None:
                return _failed(event)
        found = read(events)
        warning = response.headers.get("x-sluice-warning", "")
        return replace(found, warning=warning)

    return ask, sent


def grpc_request(served: Served, fields: dict[str, Any]) -> service_pb2.ModelInferRequest:
    path, body = _infer(served, fields)
    request = service_pb2.ModelInferRequest(model_name=path.split("/")[3])
    for sent in body["inputs"]:
        kind = object if sent["datatype"] == "BYTES" else triton_to_np_dtype(sent["datatype"])
        data = [each.encode() for each in sent["data"]] if kind is object else sent["data"]
        array = np.array(data, dtype=kind)
        request.inputs.add(name=sent["name"], datatype=sent["datatype"], shape=sent["shape"])
        raw = serialize_byte_tensor(array).item() if kind is object else array.tobytes()
        request.raw_input_contents.append(raw)
    for name, value in body["parameters"].items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        kind = "uint64_param" if name == "priority" else kind
        setattr(request.parameters[name], str(kind), value)
    return request


def _over_grpc(served: Served, fields: dict[str, Any]) -> Answer | Refusal:
    try:
        response = served.stub.ModelInfer(grpc_request(served, fields), timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return Refusal(error.code().name, error.details(), can_retry=error.code() is grpc.StatusCode.UNAVAILABLE)
    return _read_v2(tensors(response))


def _over_grpc_stream(served: Served, fields: dict[str, Any]) -> Answer | Refusal:
    request = grpc_request(served, fields)
    request.parameters["stream"].bool_param = True
    events = []
    for each in served.stub.ModelStreamInfer(iter([request]), timeout=PATIENCE_S):
        if each.error_message:
            return Refusal("stream", each.error_message)
        if each.infer_response.outputs:
            events.append(tensors(each.infer_response))
    by_sequence = [{**event, "sequence_index": event.get("sequence_index", [0])[0]} for event in events]
    return _read_generated(by_sequence)


def _runners() -> Iterator[tuple[str, Runner]]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for name, body, read, whole, streamed, split in (
        ("chat", _chat, _read_chat, {}, usage, _sse),
        ("completions", _completions, _read_chat, {}, usage, _sse),
        ("responses", _responses, _read_response, {}, {"stream": True}, _sse),
        ("messages", _messages, _read_message, {}, {"stream": True}, _sse),
        ("ollama chat", _ollama_chat, _read_ollama, {"stream": False}, {}, _lines),
        ("ollama generate", _ollama_generate, _read_ollama, {"stream": False}, {}, _lines),
    ):
        column = name.split()[0]
        yield name, Runner(name, column, *_over_http(body, read, whole, None))
        yield (
            f"{name} streamed",
            Runner(f"{name} streamed", column, *_over_http(body, read, streamed, split), is_streamed=True),
        )
    yield "generate", Runner("generate", "v2", *_over_http(_generate, _read_generated, {}, None))
    yield (
        "generate_stream",
        Runner("generate_stream", "v2", *_over_http(_generate_stream, _read_generated, {}, events_of), True),
    )
    yield "infer", Runner("infer", "v2", *_over_http(_infer, _read_infer, {}, None))
    yield "ModelInfer", Runner("ModelInfer", "v2", _over_grpc)
    yield "ModelStreamInfer", Runner("ModelStreamInfer", "v2", _over_grpc_stream, is_streamed=True)


RUNNERS = dict(_runners())
