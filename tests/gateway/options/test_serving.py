"""Options of the model repository, tracing and gRPC: repeated flags and contradictions."""

import pytest

from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import read_config
from sluice.gateway.options.option import OptionError


def test_repositories_may_come_several_times() -> None:
    flags = parse_flags(["--model-repository", "/a", "--model-store=/b"])
    assert read_config(flags, {}).repository.paths == ("/a", "/b")
    assert read_config({}, {"SLUICE_MODEL_REPOSITORY": "/a, /b"}).repository.paths == ("/a", "/b")


def test_settings_of_backends() -> None:
    given = {"--backend-config": ["onnxruntime,default-max-batch-size=8", "onnxruntime,a=b=c", "all=1"]}
    assert read_config(given, {}).repository.by_backend() == {
        "onnxruntime": {"default-max-batch-size": "8", "a": "b=c"},
        "": {"all": "1"},
    }


def test_tracing() -> None:
    given = {
        "--trace-config": ["triton,file=/tmp/t", "level=TIMESTAMPS", "rate=1", "count=5", "triton,log-frequency=9"]
    }
    trace = read_config(given, {}).trace
    assert (trace.file, trace.levels, trace.rate, trace.count, trace.log_frequency) == (
        "/tmp/t",
        frozenset({"TIMESTAMPS"}),
        1,
        5,
        9,
    )
    off = read_config({"--trace-config": ["level=OFF"]}, {}).trace
    assert (off.file, off.levels, off.rate, off.count, off.log_frequency) == ("", frozenset(), 1000, -1, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"--load-model": ["a"]}, "--load-model needs --model-control-mode explicit"),
        ({"--model-control-mode": "poll"}, "--model-control-mode poll needs --model-repository"),
        ({"--model-control-mode": "auto"}, "--model-control-mode must be one of none, poll, explicit, got 'auto'"),
        ({"--backend-config": ["onnxruntime"]}, "--backend-config must be BACKEND,KEY=VALUE"),
        ({"--trace-config": ["rate=often"]}, "--trace-config must be triton,file=PATH"),
        ({"--trace-config": ["mode=zipkin"]}, "--trace-config must be triton,file=PATH"),
        ({"--model-repository": ["/a"], "--served-model-name": "x"}, "--served-model-name names MODEL"),
        ({"--http-header-forward-pattern": "("}, "--http-header-forward-pattern must be a regular expression"),
        (
            {"--repository-poll-secs": "0.05"},
            "must be a number of seconds of at least 0.1, or 0",
        ),
    ],
)
def test_refuses(given: dict[str, str | bool | list[str]], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read_config(given, {})
