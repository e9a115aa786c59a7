"""Flags of `sluice serve` as settings: which are searched, what they become, and what is refused."""

import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import read_config
from sluice.tuning.errors import TuneError
from sluice.tuning.language_model import EngineLimits, LanguageModelSubject
from sluice.tuning.space import Dimension, Value
from tests.deploy.kubernetes.releases import needs_helm
from tests.paths import ROOT
from tests.tools.helm import render

LOAD = Dimension("concurrency", (1, 16), 1)
LIMITS = EngineLimits("openvino", 64, 2048, 1024, 1000, 32)
WORKLOADS = ("Deployment", "StatefulSet")
CHART = ROOT / "deploy" / "helm" / "sluice"


def model(
    searched: dict[str, tuple[Value, ...]] | None = None, *extra: str, path: str | None = "/m"
) -> LanguageModelSubject:
    return LanguageModelSubject(path, extra, searched or {}, LOAD, limits=LIMITS)


def values_of(subject: LanguageModelSubject) -> dict[str, tuple[Value, ...]]:
    return {each.name: each.values for each in subject.space.settings}


def test_the_sizes_of_a_step_are_searched_around_the_engines_own() -> None:
    space = model().space
    found = {each.name: each for each in space.settings}
    assert found["max-num-seqs"].values == (4, 8, 16, 32, 64, 128, 256)
    assert found["max-num-seqs"].default == 64
    assert found["max-num-batched-tokens"].values == (128, 256, 512, 1024, 2048, "auto")
    assert found["max-num-batched-tokens"].default == "auto"
    on_gpu = LanguageModelSubject(
        "/m", (), {}, LOAD, limits=LIMITS._replace(runtime="vllm", max_num_batched_tokens=8192)
    )
    assert on_gpu.space.settings[1].default == 8192


def test_flags_that_are_named_are_searched_beside_their_default() -> None:
    searched: dict[str, tuple[Value, ...]] = {"num-threads": (1, 2), "quantization": ("int8",), "max-num-seqs": (100,)}
    found = values_of(model(searched))
    assert found["num-threads"] == (1, 2, "default")
    assert found["quantization"] == ("int8", "none")
    assert found["max-num-seqs"] == (64, 100)


def test_what_follows_the_dashes_is_given_to_every_server_and_not_searched() -> None:
    subject = model(None, "--max-num-seqs=8", "--kv-cache-memory", "1G")
    assert "max-num-seqs" not in values_of(subject)
    assert subject.given("kv-cache-memory") == "1G"
    arguments = subject.arguments(subject.space.default_point(1), Path())
    assert arguments == ["/m", "--max-num-seqs=8", "--kv-cache-memory", "1G"]
    with pytest.raises(TuneError, match="given after -- too"):
        model({"max-num-seqs": (8,)}, "--max-num-seqs=8")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("block-size", (16,), "no flag of `sluice serve` that can be searched"),
        ("http-port", (1,), "no flag of `sluice serve` that can be searched"),
        ("max-num-seqs", (0,), "--search max-num-seqs must be a whole number from 1"),
        ("quantization", ("int3",), "--search quantization must be one of"),
    ],
)
def test_what_the_server_would_refuse_is_refused_before(name: str, values: tuple[Value, ...], said: str) -> None:
    with pytest.raises(TuneError, match=said):
        model({name: values})


def test_a_point_that_no_server_can_have_is_repaired() -> None:
    space = model({"replicas": (1, 2), "router": ("round-robin",)}).space
    point = space.default_point(16) | {"max-num-seqs": 256, "max-num-batched-tokens": 128, "router": "round-robin"}
    assert space.repair(point) == point | {"max-num-batched-tokens": 256, "router": "prefix"}
    assert space.repair(point | {"replicas": 2})["router"] == "round-robin"
    assert all(space.decode(space.encode(each)) == each for each in space.points())


def test_the_command_is_one_that_the_server_understands(tmp_path: Path) -> None:
    subject = model({"enable-prefix-caching": ("false",)}, "--kv-cache-memory", "1G")
    point = subject.space.default_point(1) | {"max-num-seqs": 16, "enable-prefix-caching": "false"}
    script, _ = subject.write(point, tmp_path)
    words = shlex.split(script.read_text().splitlines()[1])
    assert words[:3] == ["exec", "sluice", "serve"]
    config = read_config(parse_flags(words[3:]), {})
    assert config.scheduling.max_num_seqs == 16
    assert config.scheduling.max_num_batched_tokens is None
    assert not config.cache.enable_prefix_caching
    assert config.cache.kv_cache_memory_bytes == 1 << 30
    assert script.stat().st_mode & 0o111


def test_the_values_are_those_of_the_chart(tmp_path: Path) -> None:
    subject = model({"replicas": (1, 2), "router": ("round-robin",)}, "--dtype=bf16")
    point = subject.space.default_point(1) | {"max-num-seqs": 16, "replicas": 2, "router": "round-robin"}
    values = yaml.safe_load(subject.write(point, tmp_path)[1].read_text())
    assert values == {
        "mode": "fleet",
        "model": {"name": "/m"},
        "engine": {"args": ["--dtype=bf16", "--max-num-seqs=16"], "replicas": 2},
        "gateway": {"args": ["--router=round-robin"]},
    }
    whole = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, part in values.items():
        whole[name] = whole[name] | part if isinstance(part, dict) else part
    jsonschema.validate(whole, yaml.safe_load((CHART / "values.schema.json").read_text()))


@needs_helm
@pytest.mark.parametrize("replicas", [1, 2])
def test_helm_gives_the_flags_to_the_processes_that_take_them(replicas: int, tmp_path: Path) -> None:
    fixed = ("--dtype", "bf16", "--http-workers=2")
    subject = model({"replicas": (1, 2), "router": ("round-robin",)}, *fixed)
    changed: dict[str, Value] = {"max-num-seqs": 16, "replicas": replicas, "router": "round-robin"}
    point = subject.space.repair(subject.space.default_point(1) | changed)
    values = yaml.safe_load(subject.write(point, tmp_path)[1].read_text())
    rendered = render(values | {"curve": {"existingSecret": "keys"}})
    pods = [each["spec"]["template"]["spec"] for each in rendered.manifests if each["kind"] in WORKLOADS]
    words = [" ".join(pod["containers"][0].get("args", [])) for pod in pods]
    [of_engine] = [text for text in words if "--dtype bf16 --max-num-seqs=16" in text]
    [of_gateway] = [text for text in words if "--http-workers=2" in text]
    assert (of_engine == of_gateway) == (replicas == 1)
    assert ("--router=round-robin" in of_gateway) == (replicas == 2)
