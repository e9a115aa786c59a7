"""Fields of config.pbtxt as settings: which are searched, and the configurations that they become."""

from pathlib import Path
from typing import Any

import pytest

from sluice.serving.config.pbtxt import read_pbtxt
from sluice.tuning.config_fields import TunedModel
from sluice.tuning.errors import TuneError
from sluice.tuning.repository_model import RepositoryModelSubject
from sluice.tuning.space import Dimension, Point, Value
from tests.tuning.repositories import write_classifier, write_pipeline

LOAD = Dimension("concurrency", (16,), 16)
BATCHER = "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 500 priority_levels: 2 }\n"
GROUPS = 'instance_group [ { count: 2 kind: KIND_CPU }, { count: 1 kind: KIND_CPU name: "rest" } ]\n'


def completed(**fields: Any) -> dict[str, Any]:
    """The configuration as a server answers it."""
    groups = [{"count": 1, "kind": "KIND_CPU"}]
    return {"backend": "python", "max_batch_size": 16, "instance_group": groups} | fields


def repository(
    root: Path, searched: dict[str, tuple[Value, ...]] | None = None, config: str = "", **fields: Any
) -> RepositoryModelSubject:
    subject = RepositoryModelSubject(write_classifier(root, config=config), "classifier", (), searched or {}, LOAD)
    written = read_pbtxt(root / "classifier" / "config.pbtxt").config
    subject.tuned = {"classifier": TunedModel("classifier", written, completed(**fields))}
    return subject


def changed(subject: RepositoryModelSubject, folder: Path, **values: Value) -> str:
    point: Point = subject.space.default_point(16) | values
    subject.arguments(point, folder)
    return (folder / "classifier" / "config.pbtxt").read_text()


def test_batches_up_to_the_models_own_and_waits_for_them_are_searched(tmp_path: Path) -> None:
    space = repository(tmp_path).space
    found = {each.name: each for each in space.settings}
    assert found["max_batch_size"].values == (4, 8, 16)
    assert found["max_queue_delay_microseconds"].values == ("off", 0, 100, 500, 1000, 2000, 5000, 10_000)
    assert found["max_queue_delay_microseconds"].default == "off"
    assert found["preferred_batch_size"].values == ("none", "16", "8+16", "4+8+16")
    assert found["instance_count"].default == 1


def test_a_model_without_batches_has_instances_alone(tmp_path: Path) -> None:
    assert {each.name for each in repository(tmp_path / "a", max_batch_size=0).space.settings} <= {"instance_count"}
    sequences = repository(tmp_path / "b", {"instance_count": (1, 2)}, sequence_batching={})
    assert [each.name for each in sequences.space.settings] == ["instance_count"]


def test_a_point_becomes_a_configuration(tmp_path: Path) -> None:
    subject = repository(tmp_path / "models", {"instance_count": (1, 3)})
    values: dict[str, Value] = {
        "instance_count": 3,
        "max_batch_size": 8,
        "max_queue_delay_microseconds": 2000,
        "preferred_batch_size": "4+8",
    }
    subject.searched = dict(subject.searched) | {"preferred_batch_size": ("none", "4+8")}
    changed(subject, tmp_path / "copy", **values)
    config = read_pbtxt(tmp_path / "copy" / "classifier" / "config.pbtxt").config
    assert config.max_batch_size == 8
    assert config.instance_group[0].count == 3
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8]
    assert config.backend == "python"
    assert [each.name for each in config.input] == ["X"]


def test_what_is_not_searched_stays_as_it_is_written(tmp_path: Path) -> None:
    batching = {"max_queue_delay_microseconds": 500, "preferred_batch_size": [4, 8]}
    subject = repository(tmp_path / "models", {"instance_count": (1, 4)}, BATCHER + GROUPS, dynamic_batching=batching)
    found = {each.name: each.default for each in subject.space.settings}
    assert found["preferred_batch_size"] == "4+8"
    assert found["max_queue_delay_microseconds"] == 500
    changed(subject, tmp_path / "copy", instance_count=4, max_queue_delay_microseconds=0)
    config = read_pbtxt(tmp_path / "copy" / "classifier" / "config.pbtxt").config
    assert [(each.count, each.name) for each in config.instance_group] == [(4, ""), (4, "rest")]
    assert config.dynamic_batching.priority_levels == 2
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8]
    changed(subject, tmp_path / "copy", max_queue_delay_microseconds="off")
    config = read_pbtxt(tmp_path / "copy" / "classifier" / "config.pbtxt").config
    assert not config.HasField("dynamic_batching")
    assert config.max_batch_size == 16


def test_the_copy_has_links_and_the_original_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "models"
    subject = repository(root)
    write_classifier(root, "other")
    before = (root / "classifier" / "config.pbtxt").read_text()
    for delay in (0, 100):
        text = changed(subject, tmp_path / "copy", max_queue_delay_microseconds=delay)
        assert f"max_queue_delay_microseconds: {delay}" in text or delay == 0
    assert (root / "classifier" / "config.pbtxt").read_text() == before
    assert (tmp_path / "copy" / "classifier" / "1").resolve() == root / "classifier" / "1"
    assert (tmp_path / "copy" / "other").resolve() == root / "other"
    assert "# written by hand" in changed(subject, tmp_path / "copy")
    assert (root / "other" / "1" / "model.py").is_file()


def test_preferred_sizes_follow_the_batcher_and_the_batches(tmp_path: Path) -> None:
    space = repository(tmp_path).space
    point = space.default_point(16) | {"preferred_batch_size": "8+16", "max_queue_delay_microseconds": 100}
    assert space.repair(point) == point
    assert space.repair(point | {"max_queue_delay_microseconds": "off"})["preferred_batch_size"] == "none"
    assert space.repair(point | {"max_batch_size": 8})["preferred_batch_size"] == "none"


def test_the_models_of_an_ensemble_have_settings_of_their_own(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "models")
    searched: dict[str, tuple[Value, ...]] = {"bert.instance_count": (1, 2), "max_batch_size": (8,)}
    subject = RepositoryModelSubject(root, "pipeline", ("--strict-readiness",), searched, LOAD)
    for name in ("tokenizer", "bert"):
        written = read_pbtxt(root / name / "config.pbtxt").config
        subject.tuned[name] = TunedModel(name, written, completed())
    found = {each.name: each.values for each in subject.space.settings}
    assert found["bert.instance_count"] == (1, 2)
    assert found["bert.max_batch_size"] == found["tokenizer.max_batch_size"] == (8, 16)
    point = subject.space.default_point(16) | {"bert.instance_count": 2}
    files = subject.write(point, tmp_path)
    assert files == [tmp_path / "repository" / "bert" / "config.pbtxt", tmp_path / "serve.sh"]
    assert (tmp_path / "repository" / "tokenizer").is_symlink()
    assert "--load-model pipeline --strict-readiness" in files[1].read_text()


@pytest.mark.parametrize(
    ("label", "value", "said"),
    [
        ("instances", 1, "fields of config.pbtxt that can be searched are instance_count"),
        ("instance_count", 0, "whole numbers of at least 1"),
        ("max_queue_delay_microseconds", "never", "and off for no batcher"),
        ("preferred_batch_size", "8+x", "sizes joined by"),
        ("kind", "KIND_TPU", "KIND_GPU"),
        ("bert.instance_count", 1, "no tuned model has this field"),
    ],
)
def test_what_a_configuration_cannot_have_is_refused(tmp_path: Path, label: str, value: Value, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        repository(tmp_path, {label: (value,)}).check_searched()


def test_a_model_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="has no such model; it has classifier"):
        RepositoryModelSubject(write_classifier(tmp_path), "bert", (), {}, LOAD)
