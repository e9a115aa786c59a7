"""Sends one recorded question to a live server and returns the answer in the form of the records.

HTTP goes over a bare socket, since a library would correct the faults that the questions are about.
"""

import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from tests.triton.records import Exchange, Json, http_body
from tests.waiting import PATIENCE_S

_SERVICE = "/inference.GRPCInferenceService/"
_RAW_METHODS = {"Health.Check": "/grpc.health.v1.Health/Check", "Unknown.Method": f"{_SERVICE}NoSuchMethod"}


def base64_text(data: bytes) -> str:
    return b64encode(data).decode()


class Wire:
    """Connections to a server's two ports. Not for use from several threads."""

    def __init__(self, http_url: str, grpc_address: str) -> None:
        split = urlsplit(http_url)
        self._http_address = (split.hostname or "127.0.0.1", split.port or 80)
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(grpc_address, options=unlimited)

    def close(self) -> None:
        self._channel.close()

    def ask(self, exchange: Exchange) -> Json:
        match exchange.protocol:
            case "http":
                return ask_http(self._http_address, exchange.request)
            case "grpc":
                return ask_grpc(self._channel, exchange)
            case "local":
                return local_step(exchange.request)
            case other:
                raise ValueError(f"unknown protocol {other!r}")


@contextmanager
def open_wire(http_url: str, grpc_address: str) -> Iterator[Wire]:
    wire = Wire(http_url, grpc_address)
    try:
        yield wire
    finally:
        wire.close()


def ask_http(address: tuple[str, int], request: Json) -> Json:
    """Status 0 means that the server closed the connection, or kept silent, instead of answering."""
    body = http_body(request)
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A server may answer, and close, before it has read a body that it refuses.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(_request_head(request, body, address[1]) + body)
        try:
            with connection.makefile("rb") as stream:
                return _read_response(stream, request["method"])
        except (ConnectionResetError, TimeoutError) as error:
            return _http_answer(0, type(error).__name__, [], b"", None)


def _request_head(request: Json, body: bytes, port: int) -> bytes:
    headers = [("Host", f"localhost:{port}"), *request.get("headers", ())]
    names = {name.lower() for name, _ in headers}
    sends_body = bool(body) or request["method"] in ("POST", "PUT")
    if sends_body and not names & {"content-length", "transfer-encoding"}:
        headers.append(("Content-Length", str(len(body))))
    lines = [f"{request['method']} {request['path']} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _read_response(stream: BinaryIO, method: str) -> Json:
    status = 100
    while status == 100:
        status_line = stream.readline().decode("latin-1").rstrip("\r\n")
        if not status_line:
            return _http_answer(0, "connection closed without a response", [], b"", None)
        _, code, *reason = status_line.split(" ", 2)
        status, headers = int(code), _read_headers(stream)
    lengths = {name.lower(): value for name, value in headers}
    chunks = None
    if method == "HEAD" or status in (204, 304):
        body = b""
    elif "chunked" in lengths.get("transfer-encoding", "").lower():
        chunks = list(_read_chunks(stream))
        body = b"".join(chunks)
    else:
        body = stream.read(int(lengths.get("content-length", -1)))
    return _http_answer(status, "".join(reason), headers, body, chunks)


def _read_headers(stream: BinaryIO) -> list[tuple[str, str]]:
    headers = []
    while line := stream.readline().decode("latin-1").rstrip("\r\n"):
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    return headers


def _read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    while size := int(stream.readline().split(b";")[0] or b"0", 16):
        yield stream.read(size)
        stream.readline()
    stream.readline()


def _http_answer(
    status: int, reason: str, headers: list[tuple[str, str]], body: bytes, chunks: list[bytes] | None
) -> Json:
    answer: Json = {
        "status": status,
        "reason": reason,
        "headers": [list(header) for header in headers],
        "body_b64": base64_text(body),
    }
    return answer if chunks is None else answer | {"chunks_b64": [base64_text(chunk) for chunk in chunks]}


def ask_grpc(channel: grpc.Channel, exchange: Exchange) -> Json:
    """`code`, `message` and, of what arrived, `response` or (for a stream) `responses`."""
    received: Json = {"responses": []} if exchange.rpc == "ModelStreamInfer" else {}
    try:
        _call(channel, exchange, received)
    except grpc.RpcError as error:
        return {"code": error.code().name, "message": error.details(), **received}
    return {"code": "OK", "message": "", **received}


def _call(channel: grpc.Channel, exchange: Exchange, received: Json) -> None:
    options: dict[str, Any] = {"timeout": PATIENCE_S, "metadata": exchange.metadata or None}
    if path := _RAW_METHODS.get(exchange.rpc):
        raw = channel.unary_unary(path)(b64decode(exchange.request.get("raw_b64", "")), **options)
        received["response"] = {"raw_b64": base64_text(raw)}
        return
    request_type, response_type = _message_types(exchange.rpc)
    path = _SERVICE + exchange.rpc
    if exchange.rpc == "ModelStreamInfer":
        messages = iter([json_format.ParseDict(message, request_type()) for message in exchange.request])
        stream = channel.stream_stream(path, request_type.SerializeToString, response_type.FromString)
        for message in stream(messages, **options):
            received["responses"].append(_protobuf_json(message))
        return
    unary = channel.unary_unary(path, request_type.SerializeToString, response_type.FromString)
    received["response"] = _protobuf_json(unary(json_format.ParseDict(exchange.request, request_type()), **options))


def _message_types(rpc: str) -> tuple[Any, Any]:
    if rpc == "ModelStreamInfer":
        return service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
    return getattr(service_pb2, f"{rpc}Request"), getattr(service_pb2, f"{rpc}Response")


def _protobuf_json(message: Any) -> Json:
    as_json: Json = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return as_json


def local_step(request: Json) -> Json:
    shared = Path("/dev/shm", str(request.get("key", "")).lstrip("/"))
    match request["action"]:
        case "shm_create":
            shared.write_bytes(b64decode(request.get("data_b64", "")).ljust(request["size"], b"\0"))
        case "shm_read":
            start = request.get("offset", 0)
            return {"data_b64": base64_text(shared.read_bytes()[start : start + request["size"]])}
        case "shm_unlink":
            shared.unlink(missing_ok=True)
        case "sleep":
            time.sleep(request["seconds"])
        case other:
            raise ValueError(f"unknown step {other!r}")
    return {}
