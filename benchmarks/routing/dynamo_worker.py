"""Asks Dynamo's KV router. Runs in its environment: standard library and dynamo only.

Reads a JSON object a line: `choose` with a prompt's tokens and the blocks that replicas must be known to have first,
`first` and `end` of that request. Answers each with a line.
"""

import asyncio
import json
import os
import sys
from typing import Any

from dynamo.llm import SelectionService

MODEL = "m"
POLL_S, PATIENCE_S = 0.0002, 30.0


async def main() -> None:
    """Register a worker for each port of KV events, then do jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    block_size, num_blocks, *ports = map(int, sys.argv[1:])
    service = SelectionService(indexer_threads=1)
    for replica, port in enumerate(ports):
        worker = {
            "worker_id": replica,
            "model_name": MODEL,
            "endpoint": f"http://127.0.0.1:{9000 + replica}",  # nothing is sent there
            "block_size": block_size,
            "total_kv_blocks": num_blocks,
            "max_num_batched_tokens": 2048,
            "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
        }
        await service.upsert_worker(worker)
    answers.write(json.dumps(service.ready()["ready"]) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(await _do(service, json.loads(line))) + "\n")
    service.shutdown()


async def _do(service: Any, job: dict[str, Any]) -> int | None:
    selection = str(job["number"])
    if job["job"] == "choose":
        for replica, tokens in job["marks"]:
            await _await_block(service, replica, tokens)
        request = {"model_name": MODEL, "token_ids": job["tokens"], "selection_id": selection}
        return int((await service.select_and_reserve(request))["worker_id"])
    await (service.prefill_complete if job["job"] == "first" else service.free_reservation)(selection)
    return None


async def _await_block(service: Any, replica: int, tokens: list[int]) -> None:
    """Return when the index has heard that the replica has the block, and so of all events before."""
    request = {"model_name": MODEL, "token_ids": tokens}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            scores = await service.overlap_scores(request)
            if any(each["device_blocks"] for each in scores["workers"] if each["worker_id"] == replica):
                return
            await asyncio.sleep(POLL_S)


asyncio.run(main())
