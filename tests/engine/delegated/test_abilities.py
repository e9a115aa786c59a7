"""Prompts with images on a runtime that says how many tokens they take: lengths, blocks, cancellation, failures."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import pytest

from sluice.engine.delegated.cached_prefixes import CachedPrefixes, Owner
from sluice.engine.delegated.interface import ExpandedPrompt
from sluice.engine.frames import Cancel, Command, Shutdown, Submit
from sluice.engine.types import FinishReason, GenerateRequest
from sluice.errors import ErrorCode, invalid
from tests.engine.delegated.fake_runtime import (
    INFO,
    EndlessHandle,
    FakeHandle,
    FakeRuntime,
    SilentHandle,
    make_request,
    make_submit,
    outcomes,
    running_executor,
)
from tests.waiting import until

IMAGE = 9
"""The placeholder's token."""
SEES = msgspec.structs.replace(INFO, num_blocks=20, image_placeholders=("<image>", "<image>"))
running = partial(running_executor, info=SEES)


class SeeingRuntime(FakeRuntime):
    """Puts as many tokens in an image's place as its file has bytes, also such that the vocabulary lacks. It waits for
    `may_expand`, and fails where the file says so."""

    def __init__(self, make_handle: Callable[[GenerateRequest], Any] = lambda request: FakeHandle()) -> None:
        super().__init__(make_handle)
        self.may_expand = asyncio.Event()
        self.may_expand.set()
        self.prepared: list[tuple[GenerateRequest, Any]] = []

    async def expand(self, request: GenerateRequest) -> ExpandedPrompt:
        await self.may_expand.wait()
        if b"bad" in request.images:
            raise invalid("messages", "the image is bad")
        if b"odd" in request.images:
            raise ZeroDivisionError
        images = iter(request.images)
        tokens = [[1000] * len(next(images)) if token == IMAGE else [token] for token in request.prompt_token_ids]
        return ExpandedPrompt([*chain(*tokens)], partial(self.prepare, inputs=tuple(request.images)))

    def prepare(self, request: GenerateRequest, inputs: Any = None) -> GenerateRequest:
        self.prepared.append((request, inputs))
        return request


def submit(stream_id: int, *images: bytes, max_tokens: int = 1, **fields: Any) -> Submit:
    request = make_request(1, *[IMAGE] * len(images), 2, max_tokens=max_tokens)
    return Submit(stream_id, msgspec.structs.replace(request, images=[*images], **fields))


async def test_the_tokens_of_images_count_as_the_prompts() -> None:
    runtime = SeeingRuntime()
    async with running(runtime) as (executor, frames):
        resumed = {"resume_token_ids": [5]}
        executor.obey([submit(1, b"abc", b"de"), make_submit(2, 5), submit(3, b"abc", max_tokens=2, **resumed)])
        ended = await outcomes(frames, 3)
    assert ended[1].detail.num_prompt_tokens == 7
    assert ended[2].detail is None
    assert ended[3].detail.num_prompt_tokens == 5
    made = {len(request.prompt_token_ids): (request, inputs) for request, inputs in runtime.prepared}
    assert made[7][0].images == []
    assert made[7][1] == (b"abc", b"de")
    assert made[5][0].resume_token_ids == [5]
    assert made[1][1] is None


async def test_the_blocks_of_images_are_reserved() -> None:
    async with running(SeeingRuntime(lambda request: SilentHandle())) as (executor, frames):
        executor.obey([submit(1, b"x" * 13)])
        while (stats := (await frames.get()).stats).num_blocks_reserved == 0:
            assert stats.num_waiting + stats.num_running <= 1
        assert stats.num_blocks_reserved == 4  # 15 tokens of the prompt and one of output, in blocks of 4


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (submit(1, b"bad"), ErrorCode.INVALID, "the image is bad"),
        (submit(1, b"odd"), ErrorCode.INTERNAL, "the engine failed to prepare these images"),
        (submit(1, b"x" * 70), ErrorCode.INVALID, "the prompt has 72 tokens, but this model's context is 64"),
        (submit(1, b"x" * 20, max_tokens=60), ErrorCode.INVALID, "max_tokens may be at most 42"),
        (submit(1, *[b"x"] * 3), ErrorCode.INVALID, "may have at most 2 images, got 3"),
    ],
)
async def test_refused_alone(command: Submit, code: ErrorCode, words: str) -> None:
    async with running(SeeingRuntime()) as (executor, frames):
        executor.obey([command, make_submit(2, 5)])
        ended = await outcomes(frames, 2)
    assert (ended[1].code, words in ended[1].to_error().message) == (code, True), ended[1]
    assert ended[2].finish_reason is FinishReason.LENGTH


async def test_an_answer_without_a_length_gets_what_the_images_leave() -> None:
    runtime = SeeingRuntime()
    async with running(runtime) as (executor, frames):
        executor.obey([submit(1, b"x" * 20, max_tokens=60, fits_context=True)])
        await outcomes(frames, 1)
    assert runtime.prepared[0][0].sampling.max_tokens == 42


@pytest.mark.parametrize("end", [Cancel(1), Shutdown()])
async def test_cancelled_before_its_images_are_tokens(end: Command) -> None:
    runtime = SeeingRuntime()
    runtime.may_expand.clear()
    async with running(runtime) as (executor, frames):
        executor.obey([submit(1, b"abc")])
        while (await frames.get()).stats.num_waiting == 0:
            pass
        executor.obey([end])
        assert (await outcomes(frames, 1))[1].finish_reason is FinishReason.CANCELLED
        runtime.may_expand.set()
    assert runtime.prepared == []
    assert executor.stats().num_waiting == 0


async def test_an_adapter_that_goes_before_its_images_are_tokens() -> None:
    runtime = SeeingRuntime()
    runtime.may_expand.clear()
    async with running(runtime) as (executor, frames):
        executor.info = msgspec.structs.replace(SEES, adapters=("poet",))
        executor.obey([submit(1, b"abc", adapter="poet")])
        while (await frames.get()).stats.num_waiting == 0:
            pass
        executor.info = SEES
        runtime.may_expand.set()
        refused = (await outcomes(frames, 1))[1]
    assert (refused.code, "no adapter 'poet'" in refused.message) == (ErrorCode.INVALID, True)


class ReplacingRuntime(FakeRuntime):
    """Has an adapter whose name comes to mean another, and notes whose blocks it is handed."""

    takes_early = False

    def __init__(self, make_handle: Callable[[GenerateRequest], Any]) -> None:
        super().__init__(make_handle)
        self.digests = {"poet": "old"}
        self.prefixes = CachedPrefixes(INFO.block_size)
        self.owners: list[Owner | None] = []
        self.prefixes.hand_over = lambda number, prompt, owner: self.owners.append(owner)  # type: ignore[method-assign]

    @property
    def adapter_digests(self) -> dict[str, str]:
        return self.digests

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...


async def test_the_blocks_of_a_request_are_of_the_adapter_that_it_began_with() -> None:
    runtime = ReplacingRuntime(lambda request: EndlessHandle())
    async with running(runtime) as (executor, frames):
        executor.info = msgspec.structs.replace(SEES, adapters=("poet",))
        adapted = msgspec.structs.replace(make_request(1), adapter="poet")
        executor.obey([*(make_submit(each, 5) for each in range(SEES.max_num_seqs)), Submit(9, adapted)])
        while (await frames.get()).stats.num_waiting == 0:
            pass
        runtime.digests = {"poet": "new"}
        executor.obey([Cancel(each) for each in range(SEES.max_num_seqs)])
        await until(lambda: len(runtime.owners) > SEES.max_num_seqs)
    assert runtime.owners[-1] == Owner("", "poet", "old")


async def test_a_full_queue_refuses_before_images_are_worked_on() -> None:
    runtime = SeeingRuntime()
    runtime.may_expand.clear()
    room = SEES.max_num_seqs + 1
    async with running(runtime, max_queued_requests=1) as (executor, frames):
        executor.obey([submit(each, b"abc") for each in range(room + 1)])
        [(refused, failure)] = (await outcomes(frames, 1)).items()
        assert (refused, failure.code) == (room, ErrorCode.OVERLOADED)
        executor.obey([Submit(99, submit(99, b"abc").request, was_accepted=True)])
        runtime.may_expand.set()
        assert len(await outcomes(frames, room + 1)) == room + 1
