"""A model of a repository: fields of its config.pbtxt are the settings, and those of an ensemble's models."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.load.config import ApiKind
from sluice.serving.config.pbtxt import CONFIG_FILENAME, read_pbtxt
from sluice.tuning.config_fields import DELAY, FIELDS, KIND, MAX_BATCH, NONE, PREFERRED, TunedModel, check_value
from sluice.tuning.errors import TrialFailedError, TuneError
from sluice.tuning.server import TrialServer
from sluice.tuning.space import OFF, Dimension, Point, SearchSpace, Value
from sluice.tuning.subject import ServedCounts, write_script

_LANGUAGE_MODELS = ("llm", "tensorrtllm", "vllm")
_ENSEMBLE = "ensemble"
_NOTE = "# Written by `sluice tune`. Comments of the original are not kept.\n"


@dataclass(slots=True)
class RepositoryModelSubject:
    """A model of the repository in `root`. `searched` are the values of fields that the user names, with `MODEL.`
    before them for one model of an ensemble alone."""

    root: Path
    model: str
    extra: Sequence[str]
    searched: Mapping[str, tuple[Value, ...]]
    load: Dimension
    default_api: ApiKind = ApiKind.INFER_BINARY
    tuned: dict[str, TunedModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.root / self.model).is_dir():
            names = ", ".join(sorted(each.name for each in self.root.iterdir() if each.is_dir())[:20]) or "no model"
            raise TuneError(f"MODEL {self.model}: {self.root} has no such model; it has {names}")
        for name in self.searched:
            if name.rpartition(".")[2] not in FIELDS:
                raise TuneError(f"--search {name}: fields of config.pbtxt that can be searched are {', '.join(FIELDS)}")

    @property
    def title(self) -> str:
        return f"{self.model} of {self.root}"

    @property
    def space(self) -> SearchSpace:
        found = {}
        for model in self.tuned.values():
            usual, defaults = model.usual_values(), model.defaults()
            for name, default in defaults.items():
                values = self._searched_values(model.name, name) or usual.get(name)
                if values and set(values) != {default}:
                    label = self._label(model.name, name)
                    found[label] = Dimension(label, (default,), default).replaced(values)
        return SearchSpace(tuple(found.values()), self.load, self._repaired)

    def default_arguments(self) -> list[str]:
        return self._serve_arguments(self.root)

    async def learn(self, server: TrialServer) -> None:
        config = await self._completed(server, self.model)
        self._refuse_language_model(config)
        names = [self.model]
        if config.get("platform") == _ENSEMBLE:
            names = list(dict.fromkeys(step["model_name"] for step in config["ensemble_scheduling"]["step"]))
        for name in names:
            completed = await self._completed(server, name)
            if completed.get("platform") != _ENSEMBLE and completed.get("backend") not in _LANGUAGE_MODELS:
                self.tuned[name] = TunedModel(name, self._written(name), completed)
        self.check_searched()

    async def counters(self, server: TrialServer) -> dict[str, ServedCounts]:
        found = {}
        for name in self.tuned:
            answer = await server.get_json(f"/v2/models/{name}/stats")
            versions = [_served_counts(each) for each in answer["model_stats"]]
            found[self._label(name, "")] = ServedCounts(*map(sum, zip(*versions, strict=True)))
        return found

    def arguments(self, point: Point, folder: Path) -> list[str]:
        """Write a copy of the repository with the settings of the point, whose other files are links."""
        try:
            self._copy(point, folder)
        except OSError as error:
            raise TrialFailedError(f"{error.filename} cannot be written: {error.strerror}") from None
        return self._serve_arguments(folder)

    def write(self, point: Point, folder: Path) -> list[Path]:
        repository = folder / "repository"
        command = ["sluice", "serve", *self.arguments(point, repository)]
        configs = [repository / name / CONFIG_FILENAME for name in self._configs(point)]
        return [*configs, write_script(folder, command)]

    # -- settings

    def _label(self, model: str, name: str) -> str:
        return name if model == self.model else f"{model}.{name}"

    def _searched_values(self, model: str, name: str) -> tuple[Value, ...] | None:
        """Return the values that the user names for a field: of this model, else of all."""
        values = self.searched.get(f"{model}.{name}", self.searched.get(name))
        if values is not None and name in (PREFERRED, KIND):
            return tuple(map(str, values))
        return values

    def check_searched(self) -> None:
        """Raise TuneError where a field of --search is one that no tuned model has, or a value none of it."""
        known = {name: model.defaults() for name, model in self.tuned.items()}
        for label, values in self.searched.items():
            model, _, name = label.rpartition(".")
            if not any(name in defaults for each, defaults in known.items() if model in ("", each)):
                models = ", ".join(known) or "none"
                reason = "no tuned model has this field (a model without batches has no batcher)"
                raise TuneError(f"--search {label}: {reason}; tuned models: {models}")
            for value in values:
                check_value(label, name, value)

    def _repaired(self, point: Point) -> Point:
        """Return the point without preferred sizes where there is no batcher, or that are larger than batches."""
        repaired = dict(point)
        for model in self.tuned.values():
            labels = {name: self._label(model.name, name) for name in FIELDS}
            if labels[PREFERRED] not in point:
                continue
            defaults = model.defaults()
            delay, largest = (point.get(labels[name], defaults[name]) for name in (DELAY, MAX_BATCH))
            sizes = str(point[labels[PREFERRED]])
            if delay == OFF:
                repaired[labels[PREFERRED]] = defaults[PREFERRED]
            elif sizes != NONE and max(map(int, sizes.split("+"))) > int(largest):
                repaired[labels[PREFERRED]] = NONE
        return repaired

    def _configs(self, point: Point) -> dict[str, ModelConfig]:
        """Return the configurations of the models whose settings are not the default."""
        found = {}
        for model in self.tuned.values():
            values = {name: point[label] for name in FIELDS if (label := self._label(model.name, name)) in point}
            if any(value != model.defaults()[name] for name, value in values.items()):
                found[model.name] = model.configured(values)
        return found

    # -- files

    def _written(self, name: str) -> ModelConfig:
        path = self.root / name / CONFIG_FILENAME
        if not path.exists():
            return ModelConfig()
        try:
            return read_pbtxt(path).config
        except SluiceError as error:
            raise TuneError(error.message) from None

    def _copy(self, point: Point, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        configs = self._configs(point)
        for entry in self.root.iterdir():
            if entry.name not in configs:
                (folder / entry.name).symlink_to(entry.resolve())
        for name, config in configs.items():
            (folder / name).mkdir()
            for entry in (self.root / name).iterdir():
                if entry.name != CONFIG_FILENAME:
                    (folder / name / entry.name).symlink_to(entry.resolve())
            (folder / name / CONFIG_FILENAME).write_text(_NOTE + text_format.MessageToString(config))

    def _serve_arguments(self, root: Path) -> list[str]:
        chosen = ("--model-control-mode", "explicit", "--load-model", self.model)
        return ["--model-repository", str(root), *chosen, *self.extra]

    async def _completed(self, server: TrialServer, name: str) -> Mapping[str, Any]:
        try:
            config: Mapping[str, Any] = await server.get_json(f"/v2/models/{name}/config")
        except TrialFailedError as error:
            raise TuneError(f"MODEL {name}: {error}") from None
        return config

    def _refuse_language_model(self, config: Mapping[str, Any]) -> None:
        if config.get("backend") in _LANGUAGE_MODELS:
            raise TuneError(
                f"MODEL {self.model} is a language model: tune its folder (`sluice tune {self.root / self.model}`) and "
                "write the flags that are found into the parameters of its config.pbtxt"
            )


def _served_counts(version: Mapping[str, Any]) -> ServedCounts:
    """Return the counters of a version, as the statistics of the v2 protocol have them."""
    stats = version["inference_stats"]
    computed = ("compute_input", "compute_infer", "compute_output")
    return ServedCounts(
        int(stats["success"]["count"]),
        int(version["inference_count"]),
        int(version["execution_count"]),
        int(stats["queue"]["ns"]),
        sum(int(stats[name]["ns"]) for name in computed),
    )
