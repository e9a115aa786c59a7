"""Shows our metrics under the names of other servers too: one row for each name, with what its value is made of.

Boards, autoscalers and gateways that were made for those servers read these (`--metrics-aliases`). A row derives its
values from our own families at the scrape, so that both always say the same.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from sluice.gateway.telemetry.families import BucketFamily, Labels

Families = Mapping[str, Metric]
"""Our families by name."""
Values = Iterator[tuple[Labels, float]]
_PROTOCOL_ENDPOINTS = {
    "openai_chat": "chat_completions",
    "openai_completions": "completions",
    "anthropic_messages": "messages",
}
_FINISHES = {"cancelled": "abort"}
"""vLLM's words for finish reasons, where they differ."""


class Scheme(NamedTuple):
    """How a server labels its metrics: the name of the label with the model, and labels of every sample."""

    model: str
    constants: Labels


VLLM = Scheme("model_name", {"engine": "0"})
TRTLLM = Scheme("model_name", {"engine_type": "trtllm"})
DYNAMO = Scheme("model", {})


class Alias(NamedTuple):
    """A metric of another server. `source` says for readers what its values are; `read` makes them from our families,
    and is None for a histogram, which has the buckets of the family `source`."""

    name: str
    kind: str
    source: str
    read: Callable[[Families], Values] | None = None
    labels: tuple[str, ...] = ()
    """Labels besides the model's and the scheme's constants."""


def _samples(families: Families, name: str) -> Values:
    """Yield the samples of a family of one sample a series; none where there is no such family."""
    if name in families:
        for sample in families[name].samples:
            if not sample.name.endswith("_created"):
                yield sample.labels, sample.value


def _by_model(families: Families, name: str, also: Labels | None = None) -> dict[str, float]:
    """Return the sums of a family's samples by model; of those alone that have the labels `also`."""
    sums: dict[str, float] = {}
    for labels, value in _samples(families, name):
        if also is None or also.items() <= labels.items():
            sums[labels["model"]] = sums.get(labels["model"], 0.0) + value
    return sums


def _same(kind: str, name: str, source: str) -> Alias:
    """Return the row of a metric that is one of ours, summed by model."""
    return Alias(name, kind, source, lambda families: _model_values(_by_model(families, source)))


def _total(kind: str, name: str, *sources: str) -> Alias:
    """Return the row of a metric that is the sum of several of ours."""

    def read(families: Families) -> Values:
        first, *others = (_by_model(families, each) for each in sources)
        return _model_values(
            {model: value + sum(each.get(model, 0.0) for each in others) for model, value in first.items()}
        )

    return Alias(name, kind, " + ".join(sources), read)


def _share(name: str, part: str, *whole: str) -> Alias:
    """Return the row of a metric that is a share of ours, from 0 to 1; 0 of nothing."""

    def read(families: Families) -> Values:
        wholes = [_by_model(families, each) for each in whole]
        shares = {}
        for model, value in _by_model(families, part).items():
            total = sum(each.get(model, 0.0) for each in wholes)
            shares[model] = value / total if total else 0.0
        return _model_values(shares)

    source = f"{part} / {whole[0]}" if len(whole) == 1 else f"{part} / ({' + '.join(whole)})"
    return Alias(name, "gauge", source, read)


def _model_values(values: Mapping[str, float]) -> Values:
    return (({"model": model}, value) for model, value in values.items())


def _histogram(name: str, source: str) -> Alias:
    return Alias(name, "histogram", source)


def _finished(families: Families) -> Values:
    for labels, value in _samples(families, "sluice_finished_requests"):
        reason = labels["reason"]
        yield {"model": labels["model"], "finished_reason": _FINISHES.get(reason, reason)}, value


def _cache_config(families: Families) -> Values:
    blocks = _by_model(families, "sluice_kv_blocks")
    for model, size in _by_model(families, "sluice_kv_block_tokens").items():
        labels = {"block_size": f"{size:.0f}", "num_gpu_blocks": f"{blocks.get(model, 0):.0f}"}
        yield {"model": model, **labels}, 1.0


def _lora_requests(families: Families) -> Values:
    """Yield one sample for the whole server, as the gateways that read it take the latest one alone."""
    num_loaded = sum(_by_model(families, "sluice_engine_adapters").values())
    if not num_loaded:
        return
    names: dict[str, list[str]] = {"running": [], "waiting": []}
    for labels, value in _samples(families, "sluice_adapter_requests"):
        if value > 0:
            names[labels["state"]].append(labels["adapter"])
    lists = {f"{state}_lora_adapters": ",".join(sorted(set(found))) for state, found in names.items()}
    yield {"max_lora": f"{num_loaded:.0f}", **lists}, time.time()


def _requests_by_status(families: Families) -> Values:
    sums: dict[tuple[str, str, str], float] = {}
    for labels, value in _samples(families, "sluice_requests"):
        endpoint = _PROTOCOL_ENDPOINTS.get(labels["protocol"], labels["protocol"])
        key = labels["model"], endpoint, "success" if labels["outcome"] == "ok" else "error"
        sums[key] = sums.get(key, 0.0) + value
    for (model, endpoint, status), value in sums.items():
        yield {"model": model, "endpoint": endpoint, "status": status}, value


def _disconnected(families: Families) -> Values:
    yield {}, sum(_by_model(families, "sluice_requests", {"outcome": "cancelled"}).values())


_VLLM = (
    _same("gauge", "vllm:num_requests_running", "sluice_sequences_running"),
    _same("gauge", "vllm:num_requests_waiting", "sluice_sequences_waiting"),
    _share("vllm:kv_cache_usage_perc", "sluice_kv_blocks_used", "sluice_kv_blocks"),
    _share("vllm:gpu_cache_usage_perc", "sluice_kv_blocks_used", "sluice_kv_blocks"),
    _total("counter", "vllm:prefix_cache_queries", "sluice_engine_cached_tokens", "sluice_engine_prompt_tokens"),
    _same("counter", "vllm:prefix_cache_hits", "sluice_engine_cached_tokens"),
    _total("counter", "vllm:gpu_prefix_cache_queries", "sluice_engine_cached_tokens", "sluice_engine_prompt_tokens"),
    _same("counter", "vllm:gpu_prefix_cache_hits", "sluice_engine_cached_tokens"),
    _same("counter", "vllm:num_preemptions", "sluice_engine_preemptions"),
    _same("counter", "vllm:prompt_tokens", "sluice_prompt_tokens"),
    _same("counter", "vllm:generation_tokens", "sluice_generation_tokens"),
    Alias("vllm:request_success", "counter", "sluice_finished_requests", _finished, ("finished_reason",)),
    _histogram("vllm:request_prompt_tokens", "sluice_request_prompt_tokens"),
    _histogram("vllm:request_generation_tokens", "sluice_request_generation_tokens"),
    _histogram("vllm:request_max_num_generation_tokens", "sluice_request_generation_tokens"),
    _histogram("vllm:request_params_max_tokens", "sluice_request_max_tokens"),
    _histogram("vllm:iteration_tokens_total", "sluice_engine_step_tokens"),
    _histogram("vllm:time_to_first_token_seconds", "sluice_time_to_first_token_seconds"),
    _histogram("vllm:inter_token_latency_seconds", "sluice_inter_token_latency_seconds"),
    _histogram("vllm:time_per_output_token_seconds", "sluice_inter_token_latency_seconds"),
    _histogram("vllm:request_time_per_output_token_seconds", "sluice_time_per_output_token_seconds"),
    _histogram("vllm:e2e_request_latency_seconds", "sluice_request_duration_seconds"),
    _histogram("vllm:request_queue_time_seconds", "sluice_engine_queue_seconds"),
    _histogram("vllm:request_prefill_time_seconds", "sluice_engine_prefill_seconds"),
    _histogram("vllm:request_decode_time_seconds", "sluice_request_decode_seconds"),
    _same("counter", "vllm:spec_decode_num_draft_tokens", "sluice_engine_draft_tokens"),
    _same("counter", "vllm:spec_decode_num_accepted_tokens", "sluice_engine_accepted_tokens"),
    Alias(
        "vllm:cache_config_info",
        "gauge",
        "sluice_kv_block_tokens, sluice_kv_blocks",
        _cache_config,
        ("block_size", "num_gpu_blocks"),
    ),
    Alias(
        "vllm:lora_requests_info",
        "gauge",
        "sluice_adapter_requests, sluice_engine_adapters; the time of the scrape",
        _lora_requests,
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
)
_TRTLLM = (
    Alias("trtllm_request_success", "counter", "sluice_finished_requests", _finished, ("finished_reason",)),
    _histogram("trtllm_e2e_request_latency_seconds", "sluice_request_duration_seconds"),
    _histogram("trtllm_time_to_first_token_seconds", "sluice_time_to_first_token_seconds"),
    _histogram("trtllm_time_per_output_token_seconds", "sluice_time_per_output_token_seconds"),
    _histogram("trtllm_request_queue_time_seconds", "sluice_engine_queue_seconds"),
    _histogram("trtllm_request_prefill_time_seconds", "sluice_engine_prefill_seconds"),
    _histogram("trtllm_request_decode_time_seconds", "sluice_request_decode_seconds"),
    _same("counter", "trtllm_prompt_tokens", "sluice_prompt_tokens"),
    _same("counter", "trtllm_generation_tokens", "sluice_generation_tokens"),
    _same("counter", "trtllm_prompt_cached_tokens", "sluice_engine_cached_tokens"),
    _share(
        "trtllm_kv_cache_hit_rate",
        "sluice_engine_cached_tokens",
        "sluice_engine_cached_tokens",
        "sluice_engine_prompt_tokens",
    ),
    _share("trtllm_kv_cache_utilization", "sluice_kv_blocks_used", "sluice_kv_blocks"),
    _same("gauge", "trtllm_num_requests_running", "sluice_sequences_running"),
    _same("gauge", "trtllm_num_requests_waiting", "sluice_sequences_waiting"),
    _same("counter", "trtllm_num_requests_completed", "sluice_finished_requests"),
    _same("gauge", "trtllm_max_num_active_requests", "sluice_engine_max_num_seqs"),
    _same("gauge", "trtllm_max_batch_size_static", "sluice_engine_max_num_seqs"),
    _same("gauge", "trtllm_max_batch_size_runtime", "sluice_engine_max_num_seqs"),
    _same("gauge", "trtllm_max_num_tokens_runtime", "sluice_engine_max_num_batched_tokens"),
    _same("gauge", "trtllm_kv_cache_max_blocks", "sluice_kv_blocks"),
    _same("gauge", "trtllm_kv_cache_free_blocks", "sluice_kv_blocks_free"),
    _same("gauge", "trtllm_kv_cache_used_blocks", "sluice_kv_blocks_used"),
    _same("gauge", "trtllm_kv_cache_tokens_per_block", "sluice_kv_block_tokens"),
    _same("gauge", "trtllm_num_scheduled_requests", "sluice_sequences_running"),
    _same("counter", "trtllm_spec_decode_num_draft_tokens", "sluice_engine_draft_tokens"),
    _same("counter", "trtllm_spec_decode_num_accepted_tokens", "sluice_engine_accepted_tokens"),
)
_DYNAMO = (
    Alias("dynamo_frontend_requests", "counter", "sluice_requests", _requests_by_status, ("endpoint", "status")),
    _same("gauge", "dynamo_frontend_inflight_requests", "sluice_open_requests"),
    _same("gauge", "dynamo_frontend_queued_requests", "sluice_sequences_waiting"),
    Alias("dynamo_frontend_disconnected_clients", "gauge", 'sluice_requests{outcome="cancelled"}', _disconnected),
    _histogram("dynamo_frontend_request_duration_seconds", "sluice_request_duration_seconds"),
    _histogram("dynamo_frontend_time_to_first_token_seconds", "sluice_time_to_first_token_seconds"),
    _histogram("dynamo_frontend_inter_token_latency_seconds", "sluice_inter_token_latency_seconds"),
    _histogram("dynamo_frontend_input_sequence_tokens", "sluice_request_prompt_tokens"),
    _histogram("dynamo_frontend_output_sequence_tokens", "sluice_request_generation_tokens"),
    _same("counter", "dynamo_frontend_output_tokens", "sluice_generation_tokens"),
    _same("gauge", "dynamo_frontend_model_total_kv_blocks", "sluice_kv_blocks"),
    _same("gauge", "dynamo_frontend_model_max_num_seqs", "sluice_engine_max_num_seqs"),
    _same("gauge", "dynamo_frontend_model_max_num_batched_tokens", "sluice_engine_max_num_batched_tokens"),
    _same("gauge", "dynamo_frontend_model_context_length", "sluice_engine_max_model_len"),
    _same("gauge", "dynamo_frontend_model_kv_cache_block_size", "sluice_kv_block_tokens"),
)
TABLE: dict[str, tuple[Scheme, tuple[Alias, ...]]] = {
    "vllm": (VLLM, _VLLM),
    "trtllm": (TRTLLM, _TRTLLM),
    "dynamo": (DYNAMO, _DYNAMO),
}
"""The rows of each name of `--metrics-aliases`."""
WITHOUT_COUNTERPART = {
    "vllm": (
        *("vllm:request_inference_time_seconds", "vllm:time_per_prefill_token_request_seconds"),
        *("vllm:request_params_n", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"),
    ),
    "trtllm": (
        *("trtllm_request_inference_time_seconds", "trtllm_request_error_total", "trtllm_iteration_latency_seconds"),
        *("trtllm_kv_cache_host_utilization", "trtllm_kv_cache_iter_*", "trtllm_kv_cache_*_bytes_total"),
        *("trtllm_kv_cache_reused_blocks_total", "trtllm_kv_cache_missed_blocks_total", "trtllm_*_memory_usage_bytes"),
        *("trtllm_prefill_batch_*", "trtllm_*_perplexity", "trtllm_*_config_info"),
    ),
    "dynamo": (
        *("dynamo_component_*", "dynamo_router_*", "dynamo_frontend_worker_*", "dynamo_frontend_model_migration_*"),
        *("dynamo_frontend_cached_tokens", "dynamo_frontend_tokenizer_latency_ms", "dynamo_frontend_kv_hit_rate"),
    ),
}
"""Their names that have no aliases."""
ALIAS_NAMES = frozenset(alias.name for _, rows in TABLE.values() for alias in rows)
"""Names of the aliases, whether or not they are shown."""
_MODEL = "model"


class AliasedRegistry(CollectorRegistry):
    """A registry with aliases of its families. It may be that of a server with several processes, whose sums it then
    derives them from."""

    def __init__(self, own: CollectorRegistry, servers: Collection[str]) -> None:
        super().__init__()
        self._own = own
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._own.collect():
            families[metric.name] = metric
            yield metric
        for server in self._servers:
            scheme, rows = TABLE[server]
            for alias in rows:
                yield alias_family(alias, scheme, families)


def alias_family(alias: Alias, scheme: Scheme, families: Families) -> Metric:
    """Return an alias with the values that `families` have now; without samples where they have none."""
    text = f"The same as {alias.source}" if alias.read is None else f"From {alias.source}"
    if alias.read is None:
        return _renamed_histogram(alias, scheme, text, families.get(alias.source))
    made = Metric(alias.name, text, alias.kind)
    sample_name = f"{alias.name}_total" if alias.kind == "counter" else alias.name
    for labels, value in alias.read(families):
        if _MODEL in labels:
            labels = {
                scheme.model: labels[_MODEL],
                **{k: v for k, v in labels.items() if k != _MODEL},
                **scheme.constants,
            }
        made.add_sample(sample_name, labels, value)
    return made


def _renamed_histogram(alias: Alias, scheme: Scheme, text: str, source: Metric | None) -> Metric:
    if isinstance(source, BucketFamily):
        names = (scheme.model, *scheme.constants)
        return source.renamed(alias.name, text, names, tuple(scheme.constants.values()))
    made = Metric(alias.name, text, "histogram")
    for sample in () if source is None else source.samples:  # sums of several processes
        labels = {scheme.model if name == _MODEL else name: value for name, value in sample.labels.items()}
        name = alias.name + sample.name.removeprefix(alias.source)
        made.add_sample(name, {**labels, **scheme.constants}, sample.value, sample.timestamp, sample.exemplar)
    return made
