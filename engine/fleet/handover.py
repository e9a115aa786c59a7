"""Has prefill replicas compute the prompts of long requests, which then generate in other replicas.

The prompt goes to a prefill replica as a request of its own, for one token. Meanwhile the client of the replica that
generates holds the request. When the prompt is computed, that replica gets the request, and where the blocks are: its
engine fetches them itself (`sluice.engine.kv_tiers.peers`). Where anything goes wrong, it gets the request without
that, and computes the prompt.

A runtime that moves its blocks itself gets the request as it is for the first token, and what it hands over goes to the
replica that generates (`EngineInfo.handover_fields`)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import msgspec

from sluice.engine.client.base import Replica
from sluice.engine.client.stream import GenerationStream
from sluice.engine.client.supervision import Standing
from sluice.engine.fleet.choosing import Offer, Pick, ReplicaChooser
from sluice.engine.fleet.router import MIN_SPLIT_TOKENS
from sluice.engine.types import BlockSource, GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

PATIENCE = 4.0
"""The way over a prefill replica may take this many times as long as computing the prompt where it is needed, which
the streams there would feel."""
SLACK_S = 1.0
"""How much longer than predicted a prefill replica may take."""
FIRST_LIMIT_S = 30.0
"""How long it may take while it is unknown what computing the prompt where it is needed takes."""

SendHeld = Callable[[BlockSource | None, Standing], None]


class SplitReason(StrEnum):
    """Why a prompt is computed by a prefill replica, or is not."""

    SPLIT = "split"
    SHORT = "short"
    """The replica that generates has too little to compute."""
    WHOLE = "whole"
    """The replica that generates must compute the prompt: the request needs its logits or has images, or its runtime
    cannot go on as if it had computed the first token itself."""
    NOBODY = "nobody"
    """No prefill replica serves that has the adapter and computes the same blocks."""
    BUSY = "busy"
    """All prefill replicas would take too long."""


class SplitChoice(NamedTuple):
    """The decision, and the seconds after which a prefill replica is waited for no more."""

    reason: SplitReason
    limit_s: float = 0.0


class HandoverOutcome(StrEnum):
    """How prompts end that were given to a prefill replica."""

    HANDED_OVER = "handed_over"
    REFUSED = "refused"
    """The prefill replica had no room, or an error."""
    LOST = "lost"
    """It was lost meanwhile."""
    LATE = "late"
    """It took too long."""
    GONE = "gone"
    """The request ended first, or moved to another replica."""


class PromptHandover:
    """Sends requests by way of prefill replicas. Belongs to the fleet's event loop."""

    def __init__(self, chooser: ReplicaChooser, min_tokens: int = MIN_SPLIT_TOKENS) -> None:
        self._replicas = chooser.replicas
        self._chooser = chooser
        self.min_tokens = min_tokens
        self._following: set[asyncio.Task[None]] = set()
        self._warned: set[tuple[str, str]] = set()
        self.decisions: Counter[SplitReason] = Counter()
        self.outcomes: Counter[HandoverOutcome] = Counter()

    @property
    def has_prefill_replicas(self) -> bool:
        return any(each.is_prefill for each in self._replicas)

    def submit(self, request: GenerateRequest, offer: Offer) -> GenerationStream:
        """Submit a request to the replica of the offer, at once or when its prompt was computed elsewhere."""
        home = offer.replica
        if not home.is_prefill and self.has_prefill_replicas:
            pick, limit_s = self._choose(request, offer)
            if pick is not None:
                return self._begin(request, offer, pick, limit_s)
        return home.engine.submit(request, offer.most_wait_s, offer.num_cached_tokens)

    def _choose(self, request: GenerateRequest, offer: Offer) -> tuple[Pick | None, float]:
        """Return the prefill replica for the prompt, and how long it may take; None for none."""
        home, num_prompt = offer.replica, len(request.prompt_token_ids)
        rate = home.engine.stats.prefill_tokens_per_s
        is_whole = needs_whole_prompt(request)
        if fields := home.engine.info.handover_fields:
            is_whole = is_whole or not may_change_engines(request, fields)
        decide = partial(
            choose_split,
            num_prompt,
            offer.num_cached_tokens,
            block_size=home.engine.info.block_size,
            min_tokens=self.min_tokens,
            is_whole=is_whole,
            compute_s=(num_prompt - offer.num_cached_tokens) / rate if rate else None,
        )
        choice, pick = decide(prefill_s=0.0), None
        if choice.reason is SplitReason.SPLIT:
            pick = self._chooser.choose(request, self._prefill_candidates(request, home))
            choice = decide(prefill_s=None if pick is None else pick.cost_s)
        self.decisions[choice.reason] += 1
        return (pick if choice.reason is SplitReason.SPLIT else None), choice.limit_s

    def _prefill_candidates(self, request: GenerateRequest, home: Replica) -> list[Replica]:
        """Return the prefill replicas that can compute the prompt for `home` now."""
        serving = [each for each in self._replicas if each.is_prefill and each.engine.is_open and not each.is_leaving]
        fit = [each for each in serving if self._check_identity(each, home)]
        return [each for each in fit if each.has_adapter(request.adapter)]

    def _check_identity(self, prefill: Replica, home: Replica) -> bool:
        """Return whether both compute the same blocks. Where they do not, the log says so once."""
        theirs, ours = prefill.engine.info.block_identity, home.engine.info.block_identity
        if theirs and theirs == ours:
            return True
        if (prefill.name, home.name) not in self._warned:
            self._warned.add((prefill.name, home.name))
            log.warning(
                "replica %s hands no prompts to replica %s, whose KV blocks are not the same (identity %s and %s); "
                "both need the same runtime, openvino, torch or tensorrt_llm (with a cache_transceiver_config), prefix "
                "caching, the same model files, types and layout of the cache, type of the computation, context "
                "length, versions and kind of CPU or GPU",
                *(prefill.name, home.name, theirs or "none", ours or "none"),
            )
        return False

    def _begin(self, request: GenerateRequest, offer: Offer, pick: Pick, limit_s: float) -> GenerationStream:
        """Have the prompt computed, and hold the request until it is."""
        home, prefill = offer.replica, pick.replica
        num_blocks = (len(request.prompt_token_ids) - 1) // home.engine.info.block_size
        num_tokens = num_blocks * home.engine.info.block_size
        try:
            is_whole = bool(home.engine.info.handover_fields)
            part = first_token_request(request, limit_s) if is_whole else prompt_request(request, num_tokens, limit_s)
            prompt = _Prompt(prefill.engine.submit(part, num_cached_tokens=pick.num_cached_tokens))
        except SluiceError as error:
            self._note(request, prefill, HandoverOutcome.REFUSED, error.message)
            return home.engine.submit(request, offer.most_wait_s, offer.num_cached_tokens)
        self._chooser.note_sent(request, pick)
        prefill.num_prefilled += 1
        try:
            stream = home.engine.submit(request, offer.most_wait_s, num_tokens, on_gone=prompt.give_up)
        except SluiceError:
            prompt.give_up()
            raise
        send = partial(home.engine.send_held, stream.stream_id)
        task = asyncio.create_task(self._follow(request, prompt, prefill, num_blocks, send), name="prompt")
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return stream

    async def _follow(
        self, request: GenerateRequest, prompt: "_Prompt", prefill: Replica, num_blocks: int, send: SendHeld
    ) -> None:
        """Wait for the prompt, and send the request on, however that ends."""
        outcome, source = await prompt.end(), None
        if outcome is HandoverOutcome.HANDED_OVER and prompt.is_incomplete:
            outcome = HandoverOutcome.REFUSED
        if outcome is HandoverOutcome.HANDED_OVER:
            source = prefill.engine.block_source
            outcome = outcome if source is not None else HandoverOutcome.LOST
        if source is not None:
            source = msgspec.structs.replace(source, num_blocks=num_blocks, handover=prompt.handover)
        self._note(request, prefill, outcome, prompt.problem)
        send(source, prompt.standing)

    def _note(self, request: GenerateRequest, prefill: Replica, outcome: HandoverOutcome, problem: str) -> None:
        self.outcomes[outcome] += 1
        log.debug(
            "the prompt of request %s at replica %s: %s %s", request.request_id, prefill.name, outcome.value, problem
        )


class _Prompt:
    """A prompt that a prefill replica computes."""

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream
        self._hands_over = stream.request.hands_over
        self._outcome: HandoverOutcome | None = None
        self.standing = Standing(is_new=True)
        """The request's standing: a suspect, where its prompt may have crashed the prefill replica."""
        self.problem = ""
        self.handover = b""
        """The bytes that its runtime handed over."""
        stream.on_move = self._lose

    @property
    def is_incomplete(self) -> bool:
        """Whether its runtime was to hand over the request and did not: its first token ends it."""
        return self._hands_over and not self.handover

    def give_up(self) -> None:
        """End it: the request has ended, or goes on elsewhere."""
        self._fail(HandoverOutcome.GONE, "nobody waits for this prompt any more")
        self._stream.cancel()

    def _lose(self, standing: Standing) -> None:
        self.standing = standing if standing.is_suspect else self.standing
        self._fail(HandoverOutcome.LOST, "the replica is lost, or leaves")

    def _fail(self, outcome: HandoverOutcome, problem: str) -> None:
        self._outcome = self._outcome or outcome
        self._stream.fail(SluiceError(ErrorCode.UNAVAILABLE, problem))

    async def end(self) -> HandoverOutcome:
        """Return how it ended, once it has."""
        try:
            async for event in self._stream:
                self.handover = (event.detail and event.detail.handover) or b""
        except SluiceError as error:
            late = HandoverOutcome.LATE if error.code is ErrorCode.DEADLINE else HandoverOutcome.REFUSED
            self._outcome, self.problem = self._outcome or late, error.message
        finally:
            self._stream.cancel()
        return self._outcome or HandoverOutcome.HANDED_OVER


def first_token_request(request: GenerateRequest, limit_s: float) -> GenerateRequest:
    """Return the request for the whole prompt and the first token, with the same limit of time."""
    sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
    prompt = prompt_request(request, len(request.prompt_token_ids), limit_s)
    return msgspec.structs.replace(prompt, sampling=sampling, hands_over=True)


def prompt_request(request: GenerateRequest, num_tokens: int, limit_s: float) -> GenerateRequest:
    """Return the request for the first `num_tokens` of a prompt, which must be done in `limit_s`, and in half of the
    time that the request has, so that it can still be computed elsewhere."""
    limits_s = [each / 2 for each in (request.timeout_s, request.queue_timeout_s) if each is not None]
    return GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids[:num_tokens],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        timeout_s=min((limit_s, *limits_s)),
    )


def needs_whole_prompt(request: GenerateRequest) -> bool:
    """Return whether blocks from elsewhere are of no use to the request."""
    has_logits = request.sampling.prompt_logprobs is not None or request.returns_context_logits
    return bool(has_logits or request.images or request.resume_token_ids)


_UNSET = SamplingParams()


def may_change_engines(request: GenerateRequest, fields: Sequence[str]) -> bool:
    """Return whether one engine may choose the first token and another those after it, where the runtime's sampler can
    go on so with these `fields` of the sampling parameters alone."""
    allowed = {name: getattr(_UNSET, name) for name in fields}
    if request.sampling.temperature == 0.0:
        allowed["seed"] = None
    is_allowed = msgspec.structs.replace(request.sampling, **allowed) == _UNSET
    return is_allowed and request.sampling.max_tokens > 1 and not request.adapter


def choose_split(
    num_prompt: int,
    num_cached: int,
    *,
    block_size: int,
    min_tokens: int = MIN_SPLIT_TOKENS,
    is_whole: bool = False,
    compute_s: float | None = None,
    prefill_s: float | None = None,
) -> SplitChoice:
    """Decide about a prompt, of which the replica that generates has `num_cached` tokens and would compute the others
    in `compute_s`, None where that is unknown. `prefill_s` is what the best prefill replica takes with its waiting;
    None where there is none."""
    num_shareable = (num_prompt - 1) // block_size * block_size
    if num_shareable - num_cached < max(min_tokens, block_size):
        return SplitChoice(SplitReason.SHORT)
    if is_whole:
        return SplitChoice(SplitReason.WHOLE)
    if prefill_s is None:
        return SplitChoice(SplitReason.NOBODY)
    limit_s = FIRST_LIMIT_S if compute_s is None else PATIENCE * compute_s + SLACK_S
    if prefill_s > limit_s:
        return SplitChoice(SplitReason.BUSY)
    return SplitChoice(SplitReason.SPLIT, limit_s)
