"""The engines of a sample: their state, their KV blocks, and what they have done since the sample before."""

import asyncio
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sluice.engine.client.base import EngineClient, Replica
from sluice.engine.client.viewing import EngineViewer
from sluice.engine.frames import BlockMap, TenantTokens
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.watch.live.sample import BlockMapPart, BlocksPart, EnginePart, ReplicaPart, StepRow
from sluice.pipelines.llm.model import LlmModel

MAX_STEPS = 256
VIEW_S = 0.2
"""Seconds that a sample waits for engines. A late engine's last view is used."""
_KEEP_MORE_S = 5.0


class NamedReplica(NamedTuple):
    """An engine, with the names of its model's version and of the replica, "" for the only one."""

    model: str
    version: str
    replica: str
    engine: EngineClient
    member: Replica


def list_engines(models: Iterable[LlmModel]) -> list[NamedReplica]:
    """Return the engines of models."""
    return [
        NamedReplica(model.name, model.text.version, each.name, each.engine, each)
        for model in models
        for each in model.engine.replicas
    ]


async def ask_views(engines: Iterable[NamedReplica], interval_s: float) -> None:
    """Request views of the engines' work until after the next sample, and wait a moment for them."""
    asked = [
        each.engine.viewer.ask(2 * interval_s + _KEEP_MORE_S)
        for each in engines
        if each.engine.viewer is not None and each.engine.is_serving and each.engine.info.gives_views
    ]
    if asked:
        await asyncio.wait(asked, timeout=min(VIEW_S, interval_s / 2))


class _Known(NamedTuple):
    """An engine as a sample has seen it, for the next one to count from."""

    engine: EngineClient
    stats: EngineStats
    num_steps: int
    num_waits: int
    tenants: dict[str, TenantTokens]


class EngineWatch:
    """Describes engines from one sample to the next."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._known: dict[tuple[str, str, str], _Known] = {}
        self.waits_s: list[float] = []
        """The waits that ended since the sample before."""
        self.tenants: dict[str, TenantTokens] = {}
        """The tokens of tenants since the sample before."""

    def describe(self, engines: Iterable[NamedReplica], elapsed_s: float) -> list[EnginePart]:
        """Describe the engines, and take what they have done in the `elapsed_s` since the last call."""
        before, self._known = self._known, {}
        self.waits_s = []
        tenants: dict[str, TenantTokens] = defaultdict(TenantTokens)
        parts = []
        for each in engines:
            known = before.get(each[:3])
            if known is None or known.engine is not each.engine:
                known = None
            parts.append(self._describe(each, known, elapsed_s))
            if known is not None:
                self._take(each.engine.viewer, known, tenants)
            self._known[each[:3]] = _remember(each.engine)
        self.tenants = dict(tenants)
        return parts

    def _take(self, viewer: EngineViewer | None, known: _Known, tenants: dict[str, TenantTokens]) -> None:
        if viewer is None:
            return
        self.waits_s += viewer.waits.since(known.num_waits)
        for name, tokens in viewer.tenants.items():
            last = known.tenants.get(name, TenantTokens())
            if tokens.generated < last.generated or tokens.prompt < last.prompt:  # the engine counts anew
                last = TenantTokens()
            sums = tenants[name]
            tenants[name] = TenantTokens(
                sums.prompt + tokens.prompt - last.prompt, sums.generated + tokens.generated - last.generated
            )

    def _describe(self, named: NamedReplica, known: _Known | None, elapsed_s: float) -> EnginePart:
        engine, stats = named.engine, named.engine.stats
        before = stats if known is None else known.stats
        info = engine.info if engine.is_loaded else None
        viewer = engine.viewer if info is not None and info.gives_views else None
        state, reason = engine_state(named, self._heartbeat_timeout_s)
        steps, num_left_out = _steps(viewer, known)

        def rate(now: float, last: float) -> float:
            return round(max(0.0, now - last) / elapsed_s, 3)

        seconds = stats.runner_seconds_total + stats.overhead_seconds_total
        seconds_before = before.runner_seconds_total + before.overhead_seconds_total
        return EnginePart(
            model=named.model,
            version=named.version,
            replica=named.replica,
            runtime="" if info is None else info.runtime,
            policy="" if info is None else info.scheduler_policy,
            state=state,
            reason=hide_paths(reason),
            pids=engine.pids,
            heartbeat_age_s=round(engine.heartbeat_age_s(), 3),
            num_restarts=engine.recoveries.num_restarts,
            running=stats.num_running,
            waiting=stats.num_waiting,
            max_num_seqs=0 if info is None else info.max_num_seqs,
            predicted_wait_s=round(stats.predicted_wait_s, 4),
            prompt_tokens_per_s=rate(stats.prompt_tokens_total, before.prompt_tokens_total),
            cached_tokens_per_s=rate(stats.cached_tokens_total, before.cached_tokens_total),
            generated_tokens_per_s=rate(stats.generation_tokens_total, before.generation_tokens_total),
            steps_per_s=rate(stats.steps_total, before.steps_total),
            busy=min(1.0, rate(seconds, seconds_before)),
            blocks=_blocks(stats, info, None if viewer is None else viewer.block_map),
            block_map=None if viewer is None else _block_map(viewer.block_map),
            steps=steps,
            steps_left_out=num_left_out,
        )


def engine_state(named: NamedReplica, heartbeat_timeout_s: float) -> tuple[str, str]:
    """Return the state of an engine, and the reason where it does not serve."""
    engine = named.engine
    if engine.failure is not None:
        return "failed", engine.failure
    if not engine.is_loaded:
        return "loading", ""
    if engine.is_restarting:
        return "restarting", "the engine was lost, and another is being started"
    if engine.is_sleeping:
        return "sleeping", "the engine sleeps; POST /wake_up"
    if engine.heartbeat_age_s() >= heartbeat_timeout_s:
        return "silent", f"the engine has been silent for {engine.heartbeat_age_s():.1f} s"
    if named.member.is_leaving:
        return "draining", "it takes no new requests"
    return "serving", ""


def describe_replicas(engines: Iterable[NamedReplica], heartbeat_timeout_s: float) -> Iterator[ReplicaPart]:
    """Yield the replicas of models that have several, or may get some."""
    for each in engines:
        if each.replica:
            yield ReplicaPart(
                model=each.model,
                name=each.replica,
                state=engine_state(each, heartbeat_timeout_s)[0],
                is_leaving=each.member.is_leaving,
                version=each.member.version,
                weight=each.member.weight,
                num_routed=each.member.num_routed,
                num_adopted=each.member.num_adopted,
            )


def _remember(engine: EngineClient) -> _Known:
    viewer = engine.viewer
    if viewer is None:
        return _Known(engine, engine.stats, 0, 0, {})
    return _Known(engine, engine.stats, viewer.steps.count, viewer.waits.count, dict(viewer.tenants))


def _steps(viewer: EngineViewer | None, known: _Known | None) -> tuple[list[StepRow] | None, int]:
    """Return the newest steps since the sample before, and how many older ones there were."""
    if viewer is None:
        return None, 0
    if known is None:
        return [], 0
    num_new = viewer.steps.count - known.num_steps
    if num_new < 0:  # it records anew
        num_new = viewer.steps.count
    steps = viewer.steps.since(known.num_steps)[-MAX_STEPS:]
    rows = [(each.at_s, each.duration_ms, each.num_prefill, each.num_decode, each.num_seqs) for each in steps]
    return rows, num_new - len(rows)


def _blocks(stats: EngineStats, info: EngineInfo | None, drawn: BlockMap | None) -> BlocksPart:
    return BlocksPart(
        size=0 if info is None else info.block_size,
        total=0 if info is None else info.num_blocks,
        reserved=stats.num_blocks_reserved,
        used=stats.num_blocks_used,
        shared=None if drawn is None else drawn.num_shared,
        cached=stats.num_blocks_cached,
        free=stats.num_blocks_free,
    )


def _block_map(drawn: BlockMap | None) -> BlockMapPart | None:
    if drawn is None or not drawn.cells:
        return None
    cells, owners = b64encode(drawn.cells).decode(), b64encode(drawn.owners).decode()
    holders = [(each.request_id, each.num_blocks, each.num_worst_case) for each in drawn.holders]
    return BlockMapPart(cells, len(drawn.cells), drawn.blocks_per_cell, owners, holders)
