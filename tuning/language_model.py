"""A language model as `sluice serve MODEL` serves it: flags are its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sluice.engine.config import Runtime
from sluice.engine.runtimes import RUNTIMES
from sluice.gateway.options.config import GROUPS, list_options
from sluice.gateway.options.engine import CacheOptions, ModelOptions, SchedulingOptions, SpeculationOptions
from sluice.gateway.options.option import Option, OptionError
from sluice.gateway.options.tensorrt_llm import TensorRtLlmOptions
from sluice.load.config import ApiKind
from sluice.tuning.errors import TuneError
from sluice.tuning.server import TrialServer
from sluice.tuning.space import Dimension, Point, SearchSpace, Value
from sluice.tuning.subject import ServedCounts, write_script

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, REPLICAS = "max-num-seqs", "max-num-batched-tokens", "replicas"
BY_LOAD = "auto"
"""The value of MAX_NUM_BATCHED_TOKENS with which the engine chooses by load."""
_DEFAULT = "default"
"""The value of a flag that is left out and whose default is no plain value."""
_NOT_SEARCHED = ("http-port", "grpc-port", "metrics-port", "model-repository", "served-model-name")
_WITHOUT_EFFECT = {"router": (REPLICAS, 1), "num-speculative-tokens": ("speculation", "off")}
"""Flags that do nothing where another one has a value."""
_ENGINE_GROUPS = (ModelOptions, SchedulingOptions, CacheOptions, SpeculationOptions, TensorRtLlmOptions)
"""Groups of options that `sluice engine` has too."""


class EngineLimits(NamedTuple):
    """The limits of a running engine, by its metrics."""

    runtime: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def chooses_chunk(self) -> bool:
        """Return whether its runtime chooses the tokens of a step by load, where no flag says them."""
        return RUNTIMES[Runtime(self.runtime)].chooses_chunk


async def read_limits(server: TrialServer) -> EngineLimits:
    """Read the limits of the server's engine. Raises TuneError where it has none."""
    metrics = await server.metrics()
    names = (
        "sluice_engine_max_num_seqs",
        "sluice_engine_max_num_batched_tokens",
        "sluice_engine_max_model_len",
        "sluice_kv_blocks",
        "sluice_kv_block_tokens",
    )
    if not all(metrics.values(name) for name in names):
        raise TuneError("the server has no engine of a language model: give MODEL of `sluice serve`")
    runtime = metrics.labels("sluice_engine_info")[0]["runtime"]
    return EngineLimits(runtime, *(int(max(metrics.values(name))) for name in names))


@dataclass(slots=True)
class LanguageModelSubject:
    """MODEL of `sluice serve`, the bundled one if None. `extra` are further arguments, the same in every trial;
    `searched` are the values of flags that the user names."""

    path: str | None
    extra: Sequence[str]
    searched: Mapping[str, tuple[Value, ...]]
    load: Dimension
    model: str | None = None
    default_api: ApiKind = ApiKind.COMPLETIONS
    limits: EngineLimits | None = None
    _options: dict[str, tuple[type[Any], Any, Option]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._options = {
            option.flag.removeprefix("--"): (group, default, option)
            for group in GROUPS.values()
            for _, default, option in list_options(group)
            if option.flag.startswith("--")
        }
        for name, values in self.searched.items():
            self._check_searched(name, values)

    @property
    def title(self) -> str:
        return self.path or "the bundled model"

    @property
    def space(self) -> SearchSpace:
        found = self._usual_dimensions() | {
            name: self._dimension(name, values) for name, values in self.searched.items()
        }
        return SearchSpace(tuple(found.values()), self.load, self._repaired)

    def given(self, name: str) -> str | None:
        """Return the value that a flag has in every trial, None for one that is not given."""
        for word, following in zip(self.extra, (*self.extra[1:], ""), strict=False):
            flag, equals, value = word.partition("=")
            if flag == f"--{name}":
                return value if equals else following
        return None

    def default_arguments(self) -> list[str]:
        return [*([self.path] if self.path is not None else []), *self.extra]

    async def learn(self, server: TrialServer) -> None:
        self.limits = await read_limits(server)

    async def counters(self, server: TrialServer) -> dict[str, ServedCounts]:
        return {}  # its figures are those that clients see

    def arguments(self, point: Point, folder: Path) -> list[str]:
        return [*self.default_arguments(), *self._flags(point)]

    def write(self, point: Point, folder: Path) -> list[Path]:
        values = folder / "values.yaml"
        values.write_text(self._values(point))
        return [write_script(folder, ["sluice", "serve", *self.arguments(point, folder)]), values]

    def _flags(self, point: Point) -> list[str]:
        return [f"--{name}={value}" for name, value in self.space.changed(point).items()]

    def _values(self, point: Point) -> str:
        """Return values of the Helm chart: flags of engines, those of gateways, and replicas."""
        changed = self.space.changed(point)
        replicas = changed.pop(REPLICAS, None)
        flags = [*_words_of_flags(self.extra), *([f"--{name}={value}"] for name, value in changed.items())]
        of_engines = [word for words in flags if self._is_of_engines(words[0]) for word in words]
        of_gateways = [word for words in flags if not self._is_of_engines(words[0]) for word in words]
        values: dict[str, Any] = {} if replicas is None else {"mode": "fleet"}
        if self.path is not None:
            values["model"] = {"name": self.path}
        values["engine"] = {"args": of_engines} | ({} if replicas is None else {"replicas": replicas})
        if of_gateways:
            values["gateway"] = {"args": of_gateways}
        note = "# Found by `sluice tune`. Use: helm upgrade --install sluice deploy/helm/sluice -f values.yaml\n"
        if self.path is not None:
            note += "# model.name is the model as it was given here: write where pods find it, if that is elsewhere.\n"
        if replicas is not None:
            note += "# Mode fleet needs the keys of its processes too: curve.existingSecret (docs/kubernetes.md).\n"
        return note + yaml.safe_dump(values, sort_keys=False)

    def _is_of_engines(self, flag: str) -> bool:
        """Return whether `sluice engine` has a flag too."""
        name = flag.removeprefix("--").partition("=")[0]
        return name not in self._options or self._options[name][0] in _ENGINE_GROUPS

    # -- dimensions

    def _usual_dimensions(self) -> dict[str, Dimension]:
        """Return the flags that are searched by themselves, but for those that the user has given."""
        assert self.limits is not None, "`learn` comes first"
        seqs, tokens = self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        usual = {
            MAX_NUM_SEQS: _doublings(max(seqs // 16, 1), 4 * seqs),
            MAX_NUM_BATCHED_TOKENS: _doublings(max(tokens // 16, 16), tokens),
        }
        return {name: self._dimension(name, values) for name, values in usual.items() if self.given(name) is None}

    def _dimension(self, name: str, values: Sequence[Value]) -> Dimension:
        default = self._default(name)
        return Dimension(name, (default,), default).replaced(values)

    def _default(self, name: str) -> Value:
        limits = self.limits
        if name == MAX_NUM_SEQS and limits is not None:
            return limits.max_num_seqs
        if name == MAX_NUM_BATCHED_TOKENS and limits is not None:
            return BY_LOAD if limits.chooses_chunk else limits.max_num_batched_tokens
        default = self._options[name][1]
        if isinstance(default, bool):
            return str(default).lower()
        return default if isinstance(default, int | float) else str(default) if isinstance(default, str) else _DEFAULT

    def _check_searched(self, name: str, values: Sequence[Value]) -> None:
        """Raise TuneError for what is no flag of `sluice serve`, or for a value that it does not take."""
        if name not in self._options or name in _NOT_SEARCHED:
            known = f"{MAX_NUM_SEQS}, {MAX_NUM_BATCHED_TOKENS}, num-threads, quantization, speculation, {REPLICAS}"
            raise TuneError(f"--search {name}: no flag of `sluice serve` that can be searched. Such are {known}, ...")
        if self.given(name) is not None:
            raise TuneError(f"--search {name}: it is given after -- too; leave one of them out")
        words = {_DEFAULT, *([BY_LOAD] if name == MAX_NUM_BATCHED_TOKENS else [])}
        for value in values:
            try:
                if value not in words:
                    self._options[name][2].read(str(value), f"--search {name}")
            except OptionError as error:
                raise TuneError(str(error)) from None

    def _repaired(self, point: Point) -> Point:
        """Return the nearest point that a server can have: a step takes a token of each sequence at least."""
        repaired = dict(point)
        for name, (other, value) in _WITHOUT_EFFECT.items():
            if name in point and str(point.get(other, value)) == str(value):
                repaired[name] = self._default(name)
        seqs, tokens = point.get(MAX_NUM_SEQS), point.get(MAX_NUM_BATCHED_TOKENS)
        if isinstance(seqs, int) and isinstance(tokens, int) and tokens < seqs:
            choices = next(each for each in self.space.settings if each.name == MAX_NUM_BATCHED_TOKENS).values
            large = [each for each in choices if isinstance(each, str) or each >= seqs]
            repaired[MAX_NUM_BATCHED_TOKENS] = large[0] if large else choices[-1]
        return repaired


def _words_of_flags(words: Sequence[str]) -> list[list[str]]:
    """Split the words of a command line into those of each flag: `--flag=value`, or `--flag` and its value."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def _doublings(low: int, high: int) -> list[Value]:
    found: list[Value] = []
    while low <= high:
        found.append(low)
        low *= 2
    return found
