"""A running server whose engines change while they serve: TensorRT-LLM's adapters at run time, and its sleep, on two
replicas over the stand-in."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine.delegated.tensorrt_llm.over_stand_in import echo
from tests.gateway.serving_here import HereServer, serving_here
from tests.stand_ins.model_folders import make_adapter, make_checkpoint

MODEL = "tiny"
PROMPT = list(range(100, 180))
"""Two blocks of it can be found in the cache."""
NUM_TOKENS = 300
EXPECTED = echo(PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HereServer]:
    folder = tmp_path_factory.mktemp("changes")
    checkpoint = make_checkpoint(folder / "checkpoint", with_tokenizer=True)
    arguments = ["--runtime", "tensorrt_llm", "--replicas", "2", "--engine-heartbeat-timeout-secs", "120"]
    allowed = ["--allow-runtime-lora-updating", "--enable-sleep-mode", "--served-model-name", MODEL]
    with serving_here(str(checkpoint), *arguments, *allowed, VERSION="1.4.0", STEP_MS="4") as running:
        yield running


@pytest.fixture
def client(server: HereServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def body(model: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    told = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {**told, "return_token_ids": True, **fields}


def complete(client: httpx.Client, model: str = MODEL, num_tokens: int = 8) -> list[int]:
    answer = client.post("/v1/completions", json=body(model, num_tokens))
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@contextmanager
def streaming(client: httpx.Client, model: str = MODEL, num_tokens: int = NUM_TOKENS) -> Iterator[Iterator[list[int]]]:
    """The token ids of each event of a stream that has begun."""
    with client.stream("POST", "/v1/completions", json=body(model, num_tokens, stream=True)) as response:
        assert response.status_code == 200, response.read()
        events = (ids_of(line) for line in response.iter_lines() if line and not line.endswith("[DONE]"))
        yield chain([next(events)], events)


def ids_of(line: str) -> list[int]:
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event["error"]["message"]
    return list(event["choices"][0]["token_ids"])


def load(client: httpx.Client, name: str, path: object, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def post(client: httpx.Client, path: str) -> dict[str, Any]:
    answer = client.post(path)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# -- adapters


def test_an_adapter_comes_is_replaced_and_goes_under_traffic(client: httpx.Client, tmp_path: Path) -> None:
    with streaming(client) as base:
        assert load(client, "sql", make_adapter(tmp_path / "a")).status_code == 200
        whole = complete(client, f"{MODEL}:sql", NUM_TOKENS)
        with streaming(client, f"{MODEL}:sql") as before:
            other = make_adapter(tmp_path / "b", rank=64, modules=("o_proj", "q_proj"))
            assert "already been loaded" in load(client, "sql", other).text
            assert load(client, "sql", other, load_inplace=True).status_code == 200
            now = complete(client, f"{MODEL}:sql")
            assert unload(client, "sql").status_code == 200
            assert [*chain.from_iterable(before)] == whole, "a request keeps the adapter that it began with"
        assert [*chain.from_iterable(base)] == EXPECTED
    assert len({tuple(ids[:8]) for ids in (whole, now, complete(client))}) == 3
    assert client.post("/v1/completions", json=body(f"{MODEL}:sql", 1)).status_code == 404


def rewrite(folder: Path, **shapes: tuple[int, ...]) -> None:
    """Replace the matrices of an adapter by zeros of these shapes, by the ends of their names."""
    prefix = "base_model.model.model"
    told = {f"{prefix}.{name.replace('__', '.')}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(told, folder / "adapter_model.safetensors")


Q = "layers__0__self_attn__q_proj__lora_"


@pytest.mark.parametrize(
    ("rank", "shapes", "words"),
    [
        (65, None, "its rank must be at most 64, got 65; the setting max_lora_rank raises it"),
        (8, {f"{Q}A": (8, 64)}, "model with hidden_size 64, got (8, 64) and None"),
        (8, {f"{Q}A": (8, 32), f"{Q}B": (64, 8)}, "of a model with hidden_size 64, got (8, 32) and (64, 8)"),
        (8, {f"{Q}A".replace("0", "9"): (8, 64)}, "is of a layer beyond the model's 3"),
        (8, {"layers__0__moe__experts__1__w1__lora_A": (8, 64), "layers__0__moe__experts__1__w1__lora_B": (9, 8)},
         "it changes moe_h_to_4h, and the model was started with room for attn_dense, attn_k"),
        (8, {"lm_head__lora_A": (8, 64)}, "TensorRT-LLM has no place for base_model.model.model.lm_head.lora_A.weight"),
        (8, {}, "has no tensors"),
    ],
    ids=["rank", "half", "width", "layer", "module", "head", "empty"],
)  # fmt: skip
def test_what_does_not_fit_never_reaches_the_engine(
    client: httpx.Client, server: HereServer, tmp_path: Path, rank: int, shapes: dict[str, Any] | None, words: str
) -> None:
    pids = {each.pid for each in server.engines()}
    path = make_adapter(tmp_path / "odd", rank)
    if shapes is not None:
        rewrite(Path(path), **shapes)
    refused = load(client, "odd", path)
    assert refused.status_code in (400, 501), refused.text
    assert words in refused.json()["error"]["message"], refused.text
    assert complete(client) and {each.pid for each in server.engines()} == pids


def test_files_that_are_no_adapter(client: httpx.Client, tmp_path: Path) -> None:
    folder = Path(make_adapter(tmp_path / "bad"))
    assert load(client, "bad", tmp_path / "nowhere").status_code == 404
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(weights[:-5])
    assert "is damaged" in load(client, "bad", folder).json()["error"]["message"]
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_model.safetensors").write_bytes(weights)
    for change, words in (({"lora_alpha": None}, "lora_alpha must be a number above 0, got None"),
                          ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern must not be set"),
                          ({"use_dora": True}, "use_dora must not be set")):  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(told | change))
        assert words in load(client, "bad", folder).json()["error"]["message"]


# -- sleep


def test_streams_end_before_a_sleep_that_waits(client: httpx.Client) -> None:
    with streaming(client) as events, ThreadPoolExecutor(1) as pool:
        assert post(client, "/sleep?level=1&mode=wait") == {"status": "sleeping", "level": 1}
        assert [*chain.from_iterable(events)] == EXPECTED
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert (client.get("/health").status_code, client.get("/v2/health/live").status_code) == (503, 200)
        late = pool.submit(complete, client)
        assert post(client, "/wake_up?tags=weights")["status"] == "sleeping"
        assert not late.done()
        assert post(client, "/wake_up?tags=kv_cache")["status"] == "awake"
        assert late.result() == EXPECTED[:8], "no block of before the sleep is found"
    assert client.get("/health").status_code == 200


def test_a_sleep_that_aborts_says_so(client: httpx.Client) -> None:
    with streaming(client, num_tokens=900) as events:
        assert post(client, "/sleep")["level"] == 1
        with pytest.raises(AssertionError, match="the engine was put to sleep"):
            list(events)
    assert post(client, "/wake_up")["status"] == "awake"
    assert complete(client)


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ("level=1&mode=keep", 400, "mode must be wait or abort while requests run"),
        ("level=2", 501, "level must be 0 or 1"),
    ],
)
def test_a_sleep_that_cannot_be_hurts_nobody(client: httpx.Client, asked: str, status: int, words: str) -> None:
    with streaming(client) as events:
        refused = client.post(f"/sleep?{asked}")
        assert (refused.status_code, words in refused.json()["error"]["message"]) == (status, True), refused.text
        assert [*chain.from_iterable(events)] == EXPECTED
    assert post(client, "/wake_up")["status"] == "awake", "the replica without requests may sleep"
