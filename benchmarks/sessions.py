"""Measures what sessions cost a request: reading their names, and finding out why a prompt was computed again.

    python -m benchmarks.sessions [--repeats 2000]

Figures are microseconds of CPU time, the least of some rounds. Last, the price of a block that the engine's cache takes
from an old prefix, which it remembers.
"""

import argparse
from collections.abc import Callable
from functools import partial
from time import process_time_ns

from starlette.datastructures import Headers

from sluice.engine.blocks import BlockHash
from sluice.engine.kv_cache import BlockPool
from sluice.engine.types import EventDetail
from sluice.gateway.plane.models import find_session
from sluice.pipelines.text.model import digest_session
from sluice.pipelines.text.sessions import PromptWatch, SessionTable
from sluice.pipelines.text.types import ChatMessage, Conversation, EncodedPrompt, TemplateOptions, TextRequest

_ROUNDS = 7
_BLOCK_SIZE = 32
_AGENT = {
    "host": "localhost",
    "content-type": "application/json",
    "accept": "application/json",
    "user-agent": "agent",
    **{f"x-stainless-{name}": "value" for name in ("lang", "os", "arch", "runtime", "retry-count")},
    "x-claude-code-session-id": "3d0c1f5e",
    "x-claude-code-agent-id": "a7",
    "authorization": "Bearer none",
}


def _least_us(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = process_time_ns()
        for _ in range(repeats):
            work()
        times.append((process_time_ns() - began) / repeats / 1e3)
    return min(times)


def _conversation(num_messages: int, chars: int, num_tools: int) -> Conversation:
    messages = [ChatMessage("system", "s" * 4 * chars)]
    messages += [ChatMessage(("user", "assistant")[n % 2], f"{n}" + "m" * chars) for n in range(num_messages)]
    tools = [{"type": "function", "function": {"name": f"t{n}", "description": "d" * 600}} for n in range(num_tools)]
    return Conversation(tuple(messages), TemplateOptions(tools=tuple(tools)))


def _ask(table: SessionTable, prompt: EncodedPrompt, num_cached: int) -> None:
    request = TextRequest(request_id="r", prompt=prompt, session="s", tenant="t")
    key = digest_session(request.tenant, request.session)
    watch = PromptWatch(table, table.open(key, request, "m"), request, prompt, "m", _BLOCK_SIZE, str)
    watch.explain(EventDetail(num_cached_tokens=num_cached))


class _Growing:
    """A session whose turns add a message of some tokens, all before being cached."""

    def __init__(self, num_messages: int, num_tokens: int, num_tools: int) -> None:
        self._sent = _conversation(num_messages, 4 * num_tokens // num_messages, num_tools)
        self._ids = list(range(num_tokens))
        self._turn = self._sent.messages[-1]
        self.table = SessionTable()

    def first(self) -> None:
        _ask(SessionTable(), EncodedPrompt(self._fresh(), self._ids), 0)

    def again(self) -> None:
        _ask(self.table, EncodedPrompt(self._sent, self._ids), len(self._ids))

    def changed(self) -> None:
        _ask(self.table, EncodedPrompt(self._fresh(), self._ids), 0)

    def _fresh(self) -> Conversation:
        """Return the conversation as of a new request: the hashes of its texts are not known yet."""
        messages = tuple(ChatMessage(each.role, "".join([each.content[:-1], "x"])) for each in self._sent.messages)
        return Conversation(messages, self._sent.options)


def _reclaim(pool: BlockPool, count: int) -> None:
    blocks = pool.allocate(count)
    for block in blocks:
        pool.index(block, BlockHash(block.to_bytes(16)))
    pool.release(blocks)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    for name, sent in (("of an agent", _AGENT), ("without a session", dict(list(_AGENT.items())[:9]))):
        headers = Headers(sent)
        spent_us = _least_us(partial(find_session, headers, ("x-session-id",)), repeats)
        print(f"{'headers ' + name:<58} {spent_us:8.2f}")
    for num_messages, num_tokens, num_tools in ((4, 500, 0), (10, 2000, 8), (100, 50_000, 30), (400, 200_000, 60)):
        growing = _Growing(num_messages, num_tokens, num_tools)
        growing.again()
        few = max(repeats // num_messages, 5)
        for kind, work in (("nothing wrong", growing.again), ("first", growing.first), ("changed", growing.changed)):
            what = f"{num_messages} messages, {num_tokens} tokens, {num_tools} tools, {kind}"
            print(f"{what:<58} {_least_us(work, repeats if kind == 'nothing wrong' else few):8.2f}")
    pool = BlockPool(4096)
    print(f"{'a block taken from an old prefix':<58} {_least_us(lambda: _reclaim(pool, 4096), 20) / 4096:8.3f}")


if __name__ == "__main__":
    main()
