"""A real server that is killed in the middle of a batch, and the next one with its state."""

import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess, StartServer
from tests.waiting import wait_for

NUM_REQUESTS = 300
MAX_TOKENS = 128


def wait_for_counts(client: httpx.Client, batch: str, least: int, status: str) -> None:
    wait_for(
        lambda: client.get(f"/v1/batches/{batch}").json(),
        lambda found: found["request_counts"]["completed"] >= least and found["status"] == status,
    )


def begin(server: ServerProcess, client: httpx.Client) -> str:
    body = {"model": server.model, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"Story {i}:", "seed": i},
        }
        for i in range(NUM_REQUESTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: str = client.post("/v1/batches", json=asked).json()["id"]
    return batch


@pytest.mark.long
def test_every_request_is_answered_once(start_server: StartServer, tmp_path: Path) -> None:
    state = ("--state-path", str(tmp_path / "state"))
    first = start_server(*state)
    with first.client() as client:
        batch = begin(first, client)
        wait_for_counts(client, batch, 1, "in_progress")
        before = client.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"]
    first.process.kill()
    first.wait_exit()
    assert before < NUM_REQUESTS

    with start_server(*state).client() as client:
        wait_for_counts(client, batch, NUM_REQUESTS, "completed")
        found = client.get(f"/v1/batches/{batch}").json()
        assert found["request_counts"] == {"total": NUM_REQUESTS, "completed": NUM_REQUESTS, "failed": 0}
        assert found["usage"]["output_tokens"] == NUM_REQUESTS * MAX_TOKENS
        lines = [json.loads(each) for each in client.get(f"/v1/files/{found['output_file_id']}/content").iter_lines()]
    assert Counter(each["custom_id"] for each in lines) == {f"r{i}": 1 for i in range(NUM_REQUESTS)}
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in lines} == {MAX_TOKENS}
