"""Options of HTTP and of requests."""

import re
from dataclasses import dataclass

from sluice.gateway.front.restrictions import Restriction, find_repeated_category, parse_restriction
from sluice.gateway.options.option import (
    OptionError,
    integer,
    option,
    pattern,
    printable_text,
    seconds,
    size,
    truth,
)


def _parse_header_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", text):
        raise ValueError("the name of an HTTP header, such as x-session-id")
    return text.lower()


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """HTTP: the OpenAI API under /v1, Triton's protocol under /v2"""

    host: str = option(
        "--host",
        "127.0.0.1",
        printable_text("a host name or address"),
        "ADDRESS",
        "address to listen on, for metrics too. 0.0.0.0 takes requests from everywhere: then set SLUICE_API_KEY",
        ("--http-address",),
    )
    port: int = option("--http-port", 8000, integer(0, 65535), "PORT", "port of both protocols; 0 takes a free one")
    shares_port: bool = option(
        "--reuse-http-port",
        False,
        truth,
        "BOOL",
        "let several servers listen on the same port, each taking some of the connections; all need this option",
    )
    num_workers: int = option(
        "--http-workers",
        1,
        integer(1, 64),
        "N",
        "gateway processes that share the HTTP port. With several, each is a server with copies of models that keep "
        "nothing, and one host process has the engines and all else. Each takes some 150 MB and, busy, one core",
    )
    serves_console: bool = option(
        "--allow-console",
        True,
        truth,
        "BOOL",
        "serve the console, a page for browsers, at /console. Where keys are asked for, it asks for one too",
    )
    max_input_bytes: int = option(
        "--http-max-input-size",
        64 << 20,
        size(1),
        "SIZE",
        "longest request body: bytes, or 64M. Each request may take several times this in memory while it is parsed",
    )
    is_strict: bool = option(
        "--strict",
        False,
        truth,
        None,
        "refuse OpenAI requests with unknown fields. Without it they are ignored, and a warning header names them",
    )
    sse_keep_alive_s: float = option(
        "--sse-keep-alive-secs",
        15.0,
        seconds(0),
        "SECONDS",
        "longest silence of a stream of the OpenAI, Anthropic and RAG routes: a comment (Anthropic: a ping) breaks it, "
        "so that proxies do not close the connection; 0 sends none",
    )
    server_id: str = option(
        "--id",
        "triton",
        printable_text("a name without control characters"),
        "NAME",
        "the name under which the server presents itself in the v2 protocol's metadata",
    )
    forwarded_headers: str | None = option(
        "--http-header-forward-pattern",
        None,
        pattern,
        "REGEX",
        "headers become request parameters of the v2 protocol where REGEX (of RE2) matches in their name, in any case",
    )
    allows_client_shm: bool = option(
        "--allow-client-shm",
        False,
        truth,
        "BOOL",
        "let clients of the v2 protocol, over gRPC too, register shared memory of this machine and have tensors there",
    )
    restrictions: tuple[Restriction, ...] = option(
        "--http-restricted-api",
        (),
        parse_restriction,
        "APIS:KEY=VALUE",
        "parts of the API (health, metadata, inference, shared-memory, model-config, model-repository, statistics, "
        "trace, logging; commas between) for requests with the header KEY: VALUE. OpenAI's routes are among them. May "
        "be given several times",
        secret=True,
        is_many=True,
        separator=";",
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        if (api := find_repeated_category(self.restrictions)) is not None:
            raise OptionError(f"--http-restricted-api names '{api}' more than once; give it one key")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Requests: their prompts, how their answers are read, and time limits of those that name none"""

    allows_special_tokens: bool = option(
        "--allow-special-tokens",
        False,
        truth,
        None,
        "let messages spell special tokens (`<|end|>`), as transformers does. Who writes one can then forge others. "
        "Without it only the chat template writes them, and what a message spells is plain text",
    )
    tool_call_parser: str = option(
        "--tool-call-parser",
        "auto",
        printable_text("a format's name, auto or none"),
        "NAME",
        "the format in which the models write tool calls (docs/models.md has the names, which are vLLM's): auto, by "
        "each model's chat template; none, for models that shall get no tools",
    )
    reasoning_parser: str = option(
        "--reasoning-parser",
        "auto",
        printable_text("a format's name, auto or none"),
        "NAME",
        "the format in which the models write the reasoning before an answer: auto, by each model's chat template; "
        "none, for reasoning that stays in the answer's text",
    )

    trusts_templates: bool = option(
        "--trust-request-chat-template",
        False,
        truth,
        None,
        "let chat requests bring a chat_template of their own, which writes special tokens as it likes. It is rendered "
        "in a process of its own, within 1 s of processor time",
    )

    media_domains: tuple[str, ...] = option(
        "--allowed-media-domains",
        (),
        printable_text("a host's name, or *"),
        "HOST",
        "let images be URLs on this host, from which the server fetches them; * for any. An address that is not public "
        "must itself be given. Redirects are not followed. May be given several times",
        is_many=True,
    )

    session_headers: tuple[str, ...] = option(
        "--session-header",
        ("x-session-id",),
        _parse_header_name,
        "NAME",
        "header whose value names the session of a request: the replica that had the session's last request gets the "
        "next one, unless that would take longer. May be given several times; the first that a request has counts, and "
        "goes before the headers of agent programs, which are known without this option",
        is_many=True,
    )

    allows_lora_updates: bool = option(
        "--allow-runtime-lora-updating",
        False,
        truth,
        None,
        "let clients load and unload LoRA adapters, from any folder that the server can read, by POST "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter, and by the repository API. Steps take a bit longer for the "
        "room that this needs. --http-restricted-api and --grpc-restricted-protocol with model-repository:... keep "
        "all of these to those who have the key",
    )

    allows_sleep: bool = option(
        "--enable-sleep-mode",
        False,
        truth,
        None,
        "let clients put the engines of vLLM and TensorRT-LLM to sleep and wake them, by POST /sleep and /wake_up: "
        "they give their GPU memory back meanwhile. The restriction model-repository covers these routes",
    )

    timeout_s: float | None = option(
        "--request-timeout-secs",
        None,
        seconds(0.001),
        "SECONDS",
        "longest time from a request's arrival to its last token; one that takes longer ends in an error (504). "
        "Clients send x-sluice-timeout-ms. Default: no limit",
    )
    queue_timeout_s: float | None = option(
        "--queue-timeout-secs",
        None,
        seconds(0.001),
        "SECONDS",
        "longest time that a request waits to be admitted; then it ends in an error (504). Clients send "
        "x-sluice-queue-timeout-ms. Default: no limit",
    )
