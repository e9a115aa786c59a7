"""The differences between a server's answer and the real server's.

Only what a client acts on must be equal: status, shape of the answer, values. The wording of an error, its content type
and the order of the outputs are reported as `text`. Clock readings are not compared.
"""

import gzip
import json
import math
import re
import zlib
from base64 import b64decode
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.triton.records import Exchange, Json

_CLOCK_READINGS = {"ns", "last_inference", "lastinference"}
_COUNTERS = {"inference_count", "execution_count", "count", "batch_size"}
_PROSE = {"error", "error_message", "reason"}
_HEADER_LENGTH = "inference-header-content-length"


class Verdict(StrEnum):
    MATCH = "match"
    TEXT = "text"
    DIFFERS = "differs"


@dataclass(slots=True)
class Comparison:
    """Differences found so far, worst first."""

    differences: list[str] = field(default_factory=list)
    wordings: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        if self.differences:
            return Verdict.DIFFERS
        return Verdict.TEXT if self.wordings else Verdict.MATCH

    def differs(self, where: str, want: object, got: object) -> None:
        self.differences.append(f"{where or '$'}: {_short(got)}, not {_short(want)}")

    def reads_differently(self, where: str, want: object, got: object) -> None:
        self.wordings.append(f"{where or '$'}: {_short(got)}, not {_short(want)}")

    def values(self, want: Any, got: Any, where: str = "", *, in_statistics: bool = False) -> None:
        """Compares two JSON values; `where` is the path of both."""
        if isinstance(want, dict) and isinstance(got, dict):
            self._objects(want, got, where, in_statistics or "model_stats" in want or "inference_stats" in want)
        elif isinstance(want, list) and isinstance(got, list):
            if len(want) != len(got):
                self.differs(f"{where} length", len(want), len(got))
            for index, (left, right) in enumerate(zip(want, got, strict=False)):
                self.values(left, right, f"{where}[{index}]", in_statistics=in_statistics)
        elif not _equal_scalars(want, got):
            self.differs(where, want, got)

    def _objects(self, want: Json, got: Json, where: str, in_statistics: bool) -> None:
        if missing := want.keys() - got.keys():
            self.differs(f"{where} members missing", sorted(missing), [])
        if extra := got.keys() - want.keys():
            self.differs(f"{where} members too many", [], sorted(extra))
        for key in want.keys() & got.keys():
            self._member(key, want[key], got[key], f"{where}.{key}", in_statistics)

    def _member(self, key: str, want: Any, got: Any, where: str, in_statistics: bool) -> None:
        if key in _CLOCK_READINGS or (in_statistics and key in _COUNTERS):
            if type(want) is not type(got):
                self.differs(where, type(want).__name__, type(got).__name__)
        elif key in _PROSE and isinstance(want, str) and isinstance(got, str):
            self.prose(where, want, got)
        elif in_statistics and key == "batch_stats":
            # Which batch sizes ran depends on timing: only what an entry looks like is compared.
            if want and got:
                self.values(want[0], got[0], f"{where}[0]", in_statistics=True)
        else:
            self.values(want, got, where, in_statistics=in_statistics)

    def prose(self, where: str, want: str, got: str) -> None:
        if _canonical_prose(want) == _canonical_prose(got):
            return
        if bool(want) != bool(got):
            self.differs(where, want, got)
        else:
            self.reads_differently(where, want, got)

    def inference(self, want: Json, got: Json, where: str = "") -> None:
        """Compares two inference answers whose outputs (each with its own bytes) may come in any order."""
        named_want, named_got = _outputs(want), _outputs(got)
        if named_want is None or named_got is None:
            self.values(want, got, where)
            return
        if named_want != named_got and sorted(named_want) == sorted(named_got):
            self.reads_differently(f"{where} order of outputs", named_want, named_got)
        self.values(_with_sorted_outputs(want), _with_sorted_outputs(got), where)


def compare(exchange: Exchange, got: Json) -> Comparison:
    """Compares a fresh answer with the recorded one."""
    want = exchange.response
    if want is None:
        raise ValueError(f"{exchange.name} holds no answer")
    comparison = Comparison()
    if exchange.protocol == "http":
        _compare_http(comparison, want, got, exchange.status_only)
    elif exchange.protocol == "grpc":
        _compare_grpc(comparison, exchange, want, got)
    else:
        comparison.values(want, got)
    return comparison


def _compare_grpc(comparison: Comparison, exchange: Exchange, want: Json, got: Json) -> None:
    if want["code"] != got["code"]:
        comparison.differs("code", f"{want['code']} {want['message']}", f"{got['code']} {got['message']}")
    elif _canonical_prose(want["message"] or "") != _canonical_prose(got["message"] or ""):
        comparison.reads_differently("message", want["message"], got["message"])
    if exchange.status_only:
        return
    if exchange.rpc == "ModelInfer" and "response" in want and "response" in got:
        comparison.inference(_with_raw_contents(want["response"]), _with_raw_contents(got["response"]), "response")
        return
    for part in ("response", "responses"):
        if part in want or part in got:
            comparison.values(want.get(part), got.get(part), part)


def _compare_http(comparison: Comparison, want: Json, got: Json, status_only: bool) -> None:
    want_headers, got_headers = _headers(want), _headers(got)
    want_body, got_body = _decoded_body(want, want_headers), _decoded_body(got, got_headers)
    if want["status"] != got["status"]:
        comparison.differs("status", want["status"], f"{got['status']} {got_body[:160]!r}")
    _compare_headers(comparison, want, want_headers, got_headers)
    if status_only:
        return
    if _HEADER_LENGTH in want_headers and _HEADER_LENGTH in got_headers:
        left, _ = _split_binary(want_body, int(want_headers[_HEADER_LENGTH]))
        right, surplus = _split_binary(got_body, int(got_headers[_HEADER_LENGTH]))
        if surplus:
            comparison.differs("binary part, bytes too many", 0, len(surplus))
        comparison.inference(left, right)
    elif _media_type(want_headers) == "text/event-stream":
        _compare_events(comparison, want_body, got_body)
    else:
        _compare_bodies(comparison, want_body, got_body, failed=want["status"] >= 400)


def _compare_headers(comparison: Comparison, want: Json, want_headers: Json, got_headers: Json) -> None:
    if (_HEADER_LENGTH in want_headers) != (_HEADER_LENGTH in got_headers):
        comparison.differs(_HEADER_LENGTH, want_headers.get(_HEADER_LENGTH), got_headers.get(_HEADER_LENGTH))
    if want_headers.get("content-encoding") != got_headers.get("content-encoding"):
        encodings = want_headers.get("content-encoding"), got_headers.get("content-encoding")
        comparison.differs("content-encoding", *encodings)
    types = _media_type(want_headers), _media_type(got_headers)
    if want["body_b64"] and types[0] != types[1]:
        report = comparison.differs if want["status"] < 400 else comparison.reads_differently
        report("content-type", *types)


def _compare_bodies(comparison: Comparison, want: bytes, got: bytes, *, failed: bool) -> None:
    want_json, got_json = _parse(want), _parse(got)
    if want_json is None or got_json is None:
        if want_json is None and got_json is None and failed and want != got:
            comparison.reads_differently("body", want, got)
        elif want != got:
            comparison.differs("body", want, got)
    elif isinstance(want_json[0], dict) and isinstance(got_json[0], dict) and "model_name" in want_json[0]:
        comparison.inference(want_json[0], got_json[0])
    else:
        comparison.values(want_json[0], got_json[0])


def _compare_events(comparison: Comparison, want: bytes, got: bytes) -> None:
    want_events, got_events = ([event for event in body.split(b"\n\n") if event] for body in (want, got))
    if len(want_events) != len(got_events):
        comparison.differs("events", len(want_events), len(got_events))
    for index, (left, right) in enumerate(zip(want_events, got_events, strict=False)):
        left_json, right_json = (_parse(event.removeprefix(b"data: ")) for event in (left, right))
        if left_json and right_json and left[:6] == right[:6] == b"data: ":
            comparison.values(left_json[0], right_json[0], f"event[{index}]")
        elif left != right:
            comparison.differs(f"event[{index}]", left, right)


def _split_binary(body: bytes, header_length: int) -> tuple[Json, bytes]:
    """The JSON header with each output's own bytes put into it, and the bytes that belong to no output."""
    parsed = _parse(body[:header_length])
    if parsed is None or not isinstance(parsed[0], dict):
        return {"not JSON": repr(body[:header_length])}, b""
    header, rest = parsed[0], body[header_length:]
    outputs = []
    for output in header.get("outputs", []):
        size = output.get("parameters", {}).get("binary_data_size", 0)
        outputs.append(output | {"raw": rest[:size].hex()})
        rest = rest[size:]
    return header | {"outputs": outputs}, rest


def _with_raw_contents(response: Json) -> Json:
    response = dict(response)
    contents = response.pop("raw_output_contents", [])
    outputs = response.get("outputs", [])
    if len(contents) != len(outputs):
        return response | {"raw_output_contents": contents}
    return response | {"outputs": [output | {"raw": raw} for output, raw in zip(outputs, contents, strict=True)]}


def _outputs(response: Json) -> list[str] | None:
    outputs = response.get("outputs")
    if not isinstance(outputs, list) or not all(isinstance(output, dict) and "name" in output for output in outputs):
        return None
    return [str(output["name"]) for output in outputs]


def _with_sorted_outputs(response: Json) -> Json:
    return response | {"outputs": sorted(response["outputs"], key=lambda output: str(output["name"]))}


def _headers(answer: Json) -> Json:
    return {name.lower(): value for name, value in answer["headers"]}


def _media_type(headers: Json) -> str:
    return str(headers.get("content-type", "")).split(";")[0].strip().lower()


def _decoded_body(answer: Json, headers: Json) -> bytes:
    body = b64decode(answer["body_b64"])
    try:
        match str(headers.get("content-encoding", "")).lower():
            case "gzip":
                return gzip.decompress(body)
            case "deflate":
                return zlib.decompress(body)
    except (OSError, EOFError, zlib.error):
        pass
    return body


def _parse(body: bytes) -> tuple[Any] | None:
    """The parsed JSON in a tuple, so that `null` is told from a body that is not JSON."""
    try:
        return (json.loads(body),)
    except (ValueError, RecursionError):
        return None


def _equal_scalars(want: Any, got: Any) -> bool:
    if isinstance(want, bool) or isinstance(got, bool):
        return want is got
    if isinstance(want, int | float) and isinstance(got, int | float):
        if isinstance(want, int) and isinstance(got, int):
            return want == got
        both_nan = math.isnan(want) and math.isnan(got)
        return both_nan or math.isclose(want, got, rel_tol=1e-6, abs_tol=1e-12)
    return bool(want == got)


def _canonical_prose(text: str) -> str:
    """Error text without the folder that the models lie in and without the order of a list of names."""
    text = re.sub(r"[^\s'\"]*?(\w+/\d+/model\.py)", r"\1", text)
    return re.sub(r"\['([^\]]*)'\]", lambda names: str(sorted(names[1].split(","))), text)


def _short(value: object) -> str:
    return repr(value)[:300]
