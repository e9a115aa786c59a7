"""Options of `sluice dynamo-worker`: where the worker stands in a deployment of NVIDIA Dynamo."""

from dataclasses import dataclass

from sluice.gateway.options.option import choice, option, printable_text

_NAME = printable_text("a name without control characters")


@dataclass(frozen=True, slots=True)
class DynamoOptions:
    """Dynamo: where the worker registers, and how requests and events travel"""

    namespace: str = option(
        "--namespace",
        "dynamo",
        _NAME,
        "NAME",
        "namespace of the deployment, the same as the front end's",
        variable="DYN_NAMESPACE",
    )
    component: str = option(
        "--component",
        "sluice",
        _NAME,
        "NAME",
        "component that the workers of this model form together",
        variable="DYN_COMPONENT",
    )
    endpoint: str = option(
        "--endpoint",
        "generate",
        _NAME,
        "NAME",
        "endpoint of the component that requests are sent to",
        variable="DYN_ENDPOINT",
    )
    discovery_backend: str = option(
        "--discovery-backend",
        "file",
        choice("file", "etcd", "kubernetes", "mem"),
        "PLACE",
        "registry of workers: file, a folder that all processes share (DYN_FILE_KV); etcd; kubernetes; mem, for one "
        "process alone",
        variable="DYN_DISCOVERY_BACKEND",
    )
    request_plane: str = option(
        "--request-plane",
        "tcp",
        choice("tcp", "nats"),
        "WAY",
        "transport of requests to the worker: tcp or nats",
        variable="DYN_REQUEST_PLANE",
    )
    event_plane: str = option(
        "--event-plane",
        "zmq",
        choice("zmq", "nats"),
        "WAY",
        "transport of events of the KV cache and load to the router: zmq or nats",
        variable="DYN_EVENT_PLANE",
    )
    endpoint_types: str = option(
        "--endpoint-types",
        "chat,completions",
        choice("chat,completions", "chat", "completions"),
        "TYPES",
        "OpenAI endpoints that the front end opens for the model",
        variable="DYN_ENDPOINT_TYPES",
    )
    tool_call_parser: str | None = option(
        "--dyn-tool-call-parser",
        None,
        _NAME,
        "NAME",
        "Dynamo's parser of tool calls, which the front end runs",
        variable="DYN_TOOL_CALL_PARSER",
    )
    reasoning_parser: str | None = option(
        "--dyn-reasoning-parser",
        None,
        _NAME,
        "NAME",
        "Dynamo's parser of reasoning, which the front end runs",
        variable="DYN_REASONING_PARSER",
    )
    custom_jinja_template: str | None = option(
        "--custom-jinja-template",
        None,
        printable_text("the path of a file"),
        "FILE",
        "chat template in place of the checkpoint's own, which the front end renders",
        variable="DYN_CUSTOM_JINJA_TEMPLATE",
    )
