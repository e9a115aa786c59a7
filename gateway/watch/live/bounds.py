"""Judges a running server by two scrapes of its metrics: what bounds it, and which option to turn. Pure functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.gateway.watch.live.findings import GradedFinding, Severity
from sluice.gateway.watch.live.scrape import Change

BUSY_SHARE = 0.8
"""The share of a second in which a thread, a step or an instance is at work from which on it counts as always busy."""
LATE_S = 0.05
"""Mean lag of an event loop, in seconds, from which on clients notice it at every token."""
PREFILL_SHARE = 0.5
"""The share of an engine's time that goes to prompts from which on prefill is the bound."""
PREFILL_TOKENS_SHARE = 0.95
"""The same share counted by tokens, for an engine that does not know how fast it computes prompts."""
NEAR_LIMIT = 0.9
_SERVER, _GATEWAY = "server", "gateway"


class BoundKind(StrEnum):
    """Names what can bound a server, the gravest first. Findings are told in this order."""

    UNREADY = "unready"
    REPLICA_LOST = "replica_lost"
    ENGINE_LOST = "engine_lost"
    DEGRADED = "degraded"
    GATEWAY = "gateway"
    QUOTA = "quota"
    KV_CACHE = "kv_cache"
    QUEUE = "queue"
    PREFILL = "prefill"
    INSTANCE = "instance"
    COMPUTE = "compute"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LiveFinding(GradedFinding):
    """A finding about a running server, with the bound that it names."""

    bound: BoundKind = BoundKind.NONE


@dataclass(frozen=True)
class Health:
    """The answer of /health. `reason` says why the server takes no requests; it is "" where it does."""

    reason: str = ""
    degraded: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Observation:
    """A running server over some seconds. `num_instances` are those of its models, where that is known."""

    change: Change
    health: Health = field(default_factory=Health)
    num_instances: Mapping[str, int] = field(default_factory=dict)

    def llms(self) -> list[str]:
        """Return the names of the language models."""
        return sorted(self.change.after.by("model", "sluice_engine_max_num_seqs"))


def judge(seen: Observation) -> list[LiveFinding]:
    """Return the bounds of the server, the gravest first; one finding of the kind `none` if there is no bound."""
    change = seen.change
    found = [*judge_health(seen.health), *_judge_losses(change), *_judge_gateway(seen)]
    found += [*_judge_quotas(change), *_judge_instances(seen)]
    for model in seen.llms():
        found += _judge_llm(change, model)
    bounds = sorted(found, key=lambda each: list(BoundKind).index(each.bound))
    return bounds if any(each.bound is not BoundKind.NONE for each in bounds) else [*bounds, _at_ease(change)]


def _bound(kind: BoundKind, subject: str, text: str, remedy: str, level: Severity = Severity.WARN) -> LiveFinding:
    return LiveFinding(level, subject, text, remedy, kind)


# -- the server as a whole


def judge_health(health: Health) -> Iterator[LiveFinding]:
    """Judge the server's own health report."""
    if health.reason:
        remedy = "the log says why; requests get 503 until then"
        yield _bound(BoundKind.UNREADY, _SERVER, f"it takes no requests: {health.reason}", remedy, Severity.FAIL)
    for text in health.degraded:
        if "replica" in text:
            remedy = "the others have its requests; the log says why it was lost. More: --replicas, or the --engines"
            yield _bound(BoundKind.REPLICA_LOST, _SERVER, text, remedy, Severity.FAIL)
        else:
            yield _bound(BoundKind.DEGRADED, _SERVER, text, "the server goes on without it; the log says since when")


def _judge_losses(change: Change) -> Iterator[LiveFinding]:
    for model, count in change.increases("model", "sluice_engine_restarts_total").items():
        if count:
            text = f"its engine was lost and replaced {count:.0f} times in {change.seconds:.0f} s"
            remedy = "the log says how it ended; a kill without a line in the log is memory: lower --kv-cache-memory"
            yield _bound(BoundKind.ENGINE_LOST, model, text, remedy, Severity.FAIL)
    for model, count in change.increases("model", "sluice_engine_poisoned_requests_total").items():
        if count:
            text = f"{count:.0f} requests failed because engines crashed on them"
            yield _bound(BoundKind.ENGINE_LOST, model, text, "the log names them, at level error")


def _judge_gateway(seen: Observation) -> Iterator[LiveFinding]:
    """Judge the event loops: template, tokens' text and protocols are worked on there."""
    change, name = seen.change, "sluice_event_loop_lag_seconds"
    counts = change.increases("process", f"{name}_count")
    lags = change.increases("process", f"{name}_sum")
    for process, cpu_s in sorted(change.increases("process", "sluice_event_loop_cpu_seconds_total").items()):
        share = cpu_s / change.seconds
        # A loop that never came to its timer all the time was late by all of it.
        lag_s = lags.get(process, 0.0) / counts[process] if counts.get(process) else change.seconds
        if share < BUSY_SHARE and lag_s < LATE_S:
            continue
        text = f"the thread that all its requests pass is busy for {share:.0%} of a core and {lag_s * 1000:.0f} ms late"
        remedy = "--http-workers N answers with N processes; log probabilities and long conversations cost most"
        if share < BUSY_SHARE and change.after.value("nv_cpu_utilization") >= NEAR_LIMIT:
            text += ", as the machine has no core left for it"
            remedy = "give it cores: --num-threads below the number of cores, or engines on other machines (--engines)"
        yield _bound(BoundKind.GATEWAY, process or _GATEWAY, text, remedy)


def _judge_quotas(change: Change) -> Iterator[LiveFinding]:
    name = "sluice_quota_refusals_total"
    for labels, count in change.after.samples.get(name, {}).items():
        refused = count - change.before.samples.get(name, {}).get(labels, 0.0)
        if refused <= 0:
            continue
        named = dict(labels)
        scope, limit, tenant = named.get("scope", ""), named.get("limit", ""), named.get("tenant", "")
        flag = f"--{limit.replace('_', '-')}"
        who = f"tenant {tenant!r}" if tenant else "a key without a tenant"
        remedy = f"sluice tenants set {tenant} {flag} N" if scope == "tenant" else f"sluice keys update NAME {flag} N"
        text = f"{refused:.0f} requests of {who} were refused by its {scope}'s limit {limit}"
        yield _bound(BoundKind.QUOTA, _SERVER, text, f"{remedy} (or --default-limits)")
    for labels, used in change.after.samples.get("sluice_quota_used_ratio", {}).items():
        if used >= NEAR_LIMIT:
            named = dict(labels)
            text = f"{named.get('scope')} {named.get('name')!r} has used {used:.0%} of its {named.get('limit')}"
            yield LiveFinding(Severity.NOTE, _SERVER, text, "requests beyond it are refused")


# -- a language model


def _judge_llm(change: Change, model: str) -> Iterator[LiveFinding]:
    refused = change.increase("sluice_requests_total", model=model, outcome="overloaded")
    late = change.increase("sluice_engine_timeouts_total", model=model)
    more = f"; {refused:.0f} were refused by a full queue" if refused else ""
    more += f"; {late:.0f} ended at their deadline" if late else ""
    waiting = change.least("sluice_sequences_waiting", model=model)
    if waiting or refused:
        yield _judge_waiting(change, model, more)
    preempted = change.increase("sluice_engine_preemptions_total", model=model)
    if preempted:
        again = change.increase("sluice_engine_recomputed_tokens_total", model=model)
        text = f"{preempted:.0f} running sequences were paused for want of KV blocks, {again:.0f} tokens computed again"
        remedy = "--scheduler-policy guaranteed_no_evict never pauses; more blocks: --kv-cache-memory"
        yield _bound(BoundKind.KV_CACHE, model, text, remedy)
    yield from _judge_steps(change, model)


def _judge_waiting(change: Change, model: str, more: str) -> LiveFinding:
    """Return the resource that waiting requests lack: a place in the step, else KV blocks."""
    after = change.after
    running = change.least("sluice_sequences_running", model=model)
    places = after.value("sluice_engine_max_num_seqs", model=model)
    waiting = change.mean("sluice_sequences_waiting", model=model)
    waits = change.increase("sluice_engine_waits_total", model=model)
    text = f"{waiting:.0f} requests wait"
    if waits:
        text += f", {change.increase('sluice_engine_wait_seconds_total', model=model) / waits:.2g} s in the mean"
    if running >= places or not after.value("sluice_kv_blocks", model=model):
        text += f" for one of the {places:.0f} places of a step{more}"
        remedy = f"--max-num-seqs above {places:.0f} (each step takes longer), or more replicas (--replicas)"
        return _bound(BoundKind.QUEUE, model, text, remedy)
    blocks, reserved, used = (
        after.value(name, model=model)
        for name in ("sluice_kv_blocks", "sluice_kv_blocks_reserved", "sluice_kv_blocks_used")
    )
    text += f" for KV blocks: {reserved / blocks:.0%} of {blocks:.0f} are reserved by {running:.0f} sequences, "
    text += f"{used / blocks:.0%} are used{more}"
    remedy = "--kv-cache-memory, --kv-cache-dtype u8 (twice as many blocks), or more replicas (--replicas)"
    if used < reserved / 2:
        remedy = f"requests reserve for their max_tokens: have clients lower it; or {remedy}"
    return _bound(BoundKind.KV_CACHE, model, text, remedy)


def _judge_steps(change: Change, model: str) -> Iterator[LiveFinding]:
    """Judge what fills an engine's time: prompts, or steps."""
    replicas = change.after.by("replica", "sluice_replica_up", model=model)
    num_engines = max(1.0, sum(replicas.values()))
    busy = change.rate("sluice_engine_seconds_total", model=model, part="runner") / num_engines
    overhead = change.rate("sluice_engine_seconds_total", model=model, part="overhead") / num_engines
    if busy + overhead < BUSY_SHARE:
        return
    prompts = change.rate("sluice_engine_prompt_tokens_total", model=model)
    generated = change.rate("sluice_engine_generation_tokens_total", model=model)
    fill = f"steps fill {min(1.0, busy + overhead):.0%} of the time"
    if _is_prefilling(change, model, prompts / num_engines, generated / num_engines):
        text = f"{fill}, mostly with prompts: {prompts:.0f} tokens of prompts a second, {generated:.0f} generated"
        cached = change.rate("sluice_engine_cached_tokens_total", model=model)
        remedy = "put what prompts share first, so that the prefix cache has it" if cached < prompts else ""
        remedy = "; ".join(filter(None, (remedy, "smaller --max-num-batched-tokens keep running streams quick")))
        yield _bound(BoundKind.PREFILL, model, text, f"{remedy}; more replicas (--replicas)")
    elif overhead > busy:
        text = f"{fill}, {overhead:.0%} outside of the model: sampling, grammars and scheduling"
        remedy = "--num-threads, a smaller top_k for clients, fewer log probabilities"
        yield _bound(BoundKind.COMPUTE, model, text, remedy)
    else:
        steps = max(change.rate("sluice_engine_steps_total", model=model), 1e-9)
        step_ms = 1000 * busy * num_engines / steps
        text = f"{fill}: {steps:.0f} steps a second of {step_ms:.3g} ms, {generated:.0f} tokens a second"
        remedy = "--quantization int8, --speculation, more cores (--num-threads) or GPUs, more replicas (--replicas)"
        yield _bound(BoundKind.COMPUTE, model, text, remedy)


def _is_prefilling(change: Change, model: str, prompts: float, generated: float) -> bool:
    """Whether most of an engine's time goes to prompts, of which it computes so many tokens a second."""
    speed = change.after.value("sluice_engine_prefill_tokens_per_second", model=model)
    if speed:
        return prompts / speed >= PREFILL_SHARE
    return prompts / max(prompts + generated, 1e-9) >= PREFILL_TOKENS_SHARE


# -- models of the v2 protocol


def _judge_instances(seen: Observation) -> Iterator[LiveFinding]:
    change, llms = seen.change, set(seen.llms())
    for model in sorted(change.after.by("model", "nv_inference_pending_request_count")):
        pending = change.least("nv_inference_pending_request_count", model=model)
        if model in llms or pending < 1:
            continue
        count = seen.num_instances.get(model)
        num = (
            "its instances are"
            if count is None
            else "its one instance is"
            if count == 1
            else f"its {count} instances are"
        )
        done = change.increase("nv_inference_count", model=model)
        runs = change.increase("nv_inference_exec_count", model=model)
        queued = change.increase("nv_inference_queue_duration_us", model=model)
        text = f"{num} always busy: {pending:.0f} requests or more wait"
        if done:
            text += f", {queued / done / 1000:.0f} ms in the mean; batches have {done / max(runs, 1):.1f} inferences"
        remedy = f"instance_group {{ count: {(count or 1) + 1} }}, or dynamic_batching, in the model's config.pbtxt"
        yield _bound(BoundKind.INSTANCE, model, text, remedy)


def _at_ease(change: Change) -> LiveFinding:
    """Describe the work of a server that nothing bounds."""
    requests = change.increase("sluice_requests_total")
    if not requests and not change.mean("sluice_open_requests") and not change.increase("nv_inference_count"):
        return LiveFinding(Severity.OK, _SERVER, f"it is idle: no request in {change.seconds:.0f} s")
    text = f"nothing bounds it: {change.rate('sluice_generation_tokens_total'):.0f} tokens a second"
    ttft = change.quantile(0.5, "sluice_time_to_first_token_seconds")
    if ttft is not None:
        text += f", half of the first tokens within {ttft * 1000:.0f} ms"
    return LiveFinding(Severity.OK, _SERVER, text)
