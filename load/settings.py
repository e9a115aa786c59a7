"""Makes the configuration of a run from the values of the command line."""

import argparse
import sys

from sluice.load.config import LoadConfig, LoadConfigError, LoadTarget, RequestPace, TokenRange, ToolUse, Workload
from sluice.load.traces import read_trace


def make_config(arguments: argparse.Namespace) -> LoadConfig:
    """Return the configuration. Raises LoadConfigError for values that contradict each other or a trace."""
    return LoadConfig(
        target=_target(arguments),
        pace=_pace(arguments),
        workload=Workload(
            prompt_tokens=arguments.prompt_tokens or TokenRange(128, 128),
            output_tokens=arguments.output_tokens,
            seed=arguments.seed,
            vocab_size=arguments.vocab_size,
            tokenizer=arguments.tokenizer,
            ignore_eos=not (arguments.allow_eos or arguments.tools or arguments.json_schema),
            extra_body=arguments.extra_body,
            prefix_tokens=arguments.prefix_tokens,
            num_prefixes=arguments.num_prefixes,
            cancelled_share=arguments.cancel_share,
            trace=arguments.trace,
            shapes=dict(arguments.shape),
            turns=arguments.turns,
            think_s=arguments.think_time,
            stores_turns=not arguments.resend_history,
            num_images=arguments.images,
            image_size=arguments.image_size,
            tool_use=_tool_use(arguments),
            json_schema=arguments.json_schema,
            collection=arguments.collection,
        ),
        slo=arguments.slo,
        num_processes=arguments.processes,
        metrics_url=None if arguments.metrics_url == "none" else arguments.metrics_url,
        measures_energy=True,
    )


def _tool_use(arguments: argparse.Namespace) -> ToolUse | None:
    if arguments.tools is None:
        if arguments.tool_choice != "auto":
            raise LoadConfigError("--tool-choice goes with --tools")
        return None
    if arguments.turns.high > 1:
        raise LoadConfigError("--tools: with --turns a call would need a result before the next turn; use one of them")
    return ToolUse(arguments.tools, arguments.tool_choice)


def _target(arguments: argparse.Namespace) -> LoadTarget:
    key = (("Authorization", f"Bearer {arguments.api_key}"),) if arguments.api_key else ()
    headers = (*key, *arguments.header)
    return LoadTarget(arguments.url, arguments.api, arguments.model, headers, arguments.timeout)


def _pace(arguments: argparse.Namespace) -> RequestPace:
    is_open = arguments.request_rate is not None
    speed = _replay_speed(arguments)
    has_end = arguments.num_requests is not None or arguments.duration is not None or arguments.trace is not None
    return RequestPace(
        concurrency=arguments.concurrency or (None if is_open or speed else 1),
        request_rate=arguments.request_rate,
        arrival=arguments.arrival,
        burstiness=arguments.burstiness,
        final_rate=arguments.final_rate,
        replay_speed=speed,
        num_requests=_num_requests(arguments) if has_end else 32,
        duration_s=arguments.duration,
        warmup=arguments.warmup,
    )


def _num_requests(arguments: argparse.Namespace) -> int | None:
    """Return the number of requests, at most those of the trace."""
    if arguments.trace is None:
        return arguments.num_requests  # type: ignore[no-any-return]
    return min(len(read_trace(arguments.trace)), arguments.num_requests or sys.maxsize)


def _replay_speed(arguments: argparse.Namespace) -> float | None:
    """Return the speed of a replay, None where the trace, if any, is sent at another pace. Raises LoadConfigError."""
    is_paced = arguments.concurrency is not None or arguments.request_rate is not None
    if arguments.replay_speed is not None and (arguments.trace is None or is_paced):
        raise LoadConfigError("--replay-speed goes with --trace, and with neither --concurrency nor --request-rate")
    if arguments.trace is None or is_paced:
        return None
    if any(each.at_s is None for each in read_trace(arguments.trace)):
        raise LoadConfigError(f"--trace {arguments.trace} has no times: add --concurrency or --request-rate")
    return float(arguments.replay_speed or 1.0)
