from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2

from engine.errors import ErrorCode, SluiceError
from pipelines.repository.config_json import config_json, parse_config_json
from pipelines.repository.config_text import parse_config, read_config

SEEDS = sorted((Path(__file__).parents[2] / "data" / "seed_configs").glob("*.pbtxt"))
INVALID_SEEDS = {"004_rate_limit_invalid": "line 1, column 1", "004_version_policy_agents_invalid": "line 1, column 25"}
BYTES_NOTE = "TYPE_BYTES is read as TYPE_STRING, its name in config.pbtxt"


def refusal(text: str) -> str:
    with pytest.raises(SluiceError) as caught:
        parse_config(text, "m/config.pbtxt")
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_configurations_that_users_wrote(path: Path) -> None:
    place = INVALID_SEEDS.get(path.stem)
    if place is not None:
        with pytest.raises(SluiceError, match=place) as caught:
            read_config(path)
        assert str(path) in caught.value.message
        return
    config, notes = read_config(path)
    assert notes == ([BYTES_NOTE] if path.stem == "000_llama3_8b" else [])
    assert parse_config_json(config_json(config)) == config


def test_bytes_is_a_word_only_where_a_type_stands() -> None:
    text = """
    name: "TYPE_BYTES" # TYPE_BYTES
    input { name: 'TYPE_BYTES' data_type:TYPE_BYTES }
    output { name: "a\\"TYPE_BYTES" data_type: TYPE_BYTES dims: 1 }
    """
    config, notes = parse_config(text, "m")
    assert (config.name, config.input[0].name, config.output[0].name) == ("TYPE_BYTES", "TYPE_BYTES", 'a"TYPE_BYTES')
    assert config.input[0].data_type == config.output[0].data_type == model_config_pb2.TYPE_STRING
    assert notes == [BYTES_NOTE]
    assert parse_config('name: "TYPE_BYTES"', "m")[1] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: 'a'\nmax_batchsize: 4", "line 2, column 1: ModelConfig has no field 'max_batchsize'; "
                                        "did you mean 'max_batch_size'?"),
        ("input [\n { nome: 'a' } ]", "line 2, column 4: ModelInput has no field 'nome'; did you mean 'name'?"),
        ("zzz: 1", "line 1, column 1: ModelConfig has no field 'zzz'"),
        ("input { data_type: TYPE_FLOAT }", 'has no value named TYPE_FLOAT'),
        ("max_batch_size: many", "line 1, column 17"),
        ("input {", "line 1"),
        ("dynamic_batching {}\nsequence_batching {}", "line 2, column 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where(text: str, expected: str) -> None:
    message = refusal(text)
    assert message.startswith("failed to read text proto from m/config.pbtxt: ")
    assert expected in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="No such file"):
        read_config(tmp_path / "config.pbtxt")
    (tmp_path / "config.pbtxt").write_bytes(b"name: '\xff'")
    with pytest.raises(SluiceError, match="byte 7 is not UTF-8"):
        read_config(tmp_path / "config.pbtxt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "the model configuration is not JSON"),
        ("[]", "Root element must be a message."),
        ('{"foo": 1}', "ModelConfig has no field 'foo'"),
        ('{"inputs": []}', "ModelConfig has no field 'inputs'; did you mean 'input'?"),
        ('{"input": [{"data_type": "TYPE_FOO"}]}', "TYPE_FOO"),
        ('{"max_batch_size": "x"}', "max_batch_size"),
        ('{"input": 5}', "input"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "scheduling_choice"),
        ('{"max_batch_size": 99999999999}', "max_batch_size"),
        ('{"name": "\\ud800"}', "not JSON"),
    ],
)
def test_json_that_is_no_configuration(text: str, expected: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse_config_json(text)
    assert caught.value.code is ErrorCode.INVALID
    assert expected in caught.value.message
    assert "Available Fields" not in caught.value.message


def test_json_reads_bytes_as_text_does() -> None:
    config = parse_config_json('{"name": "TYPE_BYTES", "input": [{"name": "TYPE_BYTES", "data_type": "TYPE_BYTES"}]}')
    assert (config.name, config.input[0].data_type) == ("TYPE_BYTES", model_config_pb2.TYPE_STRING)
