from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.config.config_json import config_json, parse_config_json
from tests import paths
from tests.serving.config.parts import parse_config, read_config

SEEDS = sorted((paths.DATA / "seed_configs").glob("*.pbtxt"))
INVALID_SEEDS = {"004_rate_limit_invalid": ":1:1: "}
MENDED_SEEDS = {
    "000_llama3_8b": [8, 29],
    "004_bert_classifier": [45],
    "004_tensorrt_cc_model_filenames": [3, 7, 11],
    "004_version_policy_agents_invalid": [1],
}
BYTES_NOTE = "TYPE_BYTES is read as TYPE_STRING, its name in config.pbtxt; write: data_type: TYPE_STRING"


def refusal(text: str) -> str:
    with pytest.raises(SluiceError) as caught:
        parse_config(text, "m/config.pbtxt")
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_configurations_that_users_wrote(path: Path) -> None:
    """test_seed_configs.py loads them."""
    place = INVALID_SEEDS.get(path.stem)
    if place is not None:
        with pytest.raises(SluiceError) as caught:
            read_config(path)
        assert f"{path}{place}" in caught.value.message
        return
    config, notes = read_config(path)
    assert [int(note.split(":")[1]) for note in notes] == MENDED_SEEDS.get(path.stem, [])
    assert all(note.startswith(f"{path.name}:") and "; write: " in note for note in notes)
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
    assert notes == [f"m:3: {BYTES_NOTE} (also in line 4)"]
    assert parse_config('name: "TYPE_BYTES"', "m")[1] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: 'a'\nmax_batchsize: 4", ":2:1: ModelConfig has no field 'max_batchsize'; did you mean "
                                        "'max_batch_size'?"),
        ("input [\n { nome: 'a' } ]", ":2:4: ModelInput has no field 'nome'; did you mean 'name'?"),
        ("zzz: 1", ":1:1: ModelConfig has no field 'zzz'"),
        (r"name: 'a\\b'" "\n" r"backend: 'C:\models'", ":2:1: a string of protobuf has no escape sequence \\m: a "
                                                    "backslash is written as \\\\"),
        (r"parameters { key: 'a' value { string_value: '\u12' } }", ":1:31: a string of protobuf has no escape "
                                                                    "sequence \\u"),
        ("num_versions: 2", ":1:1: ModelConfig has no field 'num_versions'; it stands in version_policy.latest"),
        ("zzz { zz: 1 }\nyyy: [1, 2]", ":1:1: ModelConfig has no field 'zzz'; config.pbtxt:2:1: ModelConfig has no "
                                       "field 'yyy'"),
        ("input {\n data_type: TYPE_FLOAT }", ":2:2: data_type has no value named TYPE_FLOAT; write: data_type: "
                                              "TYPE_FP32"),
        ("input { data_type: INT64 }", "data_type has no value named INT64; write: data_type: TYPE_INT64"),
        ("input { data_type: TYPE_ODD }", ":1:9: data_type has no value named TYPE_ODD"),
        ("instance_group { kind: GPU }", ":1:18: kind has no value named GPU; there are KIND_AUTO, KIND_GPU, KIND_CPU, "
                                         "KIND_MODEL; write: kind: KIND_GPU"),
        ("model_repository_agents { kind: \"checksum\" }", ":1:27: model_repository_agents has no field 'kind'; write: "
                                                        'model_repository_agents { agents [ { name: "checksum" } ] }'),
        ("model_repository_agents { kind: 'version_policy' }", "write: version_policy { latest { num_versions: 1 } }"),
        ("version_policy { latest { num_versions: 2 } }\nmodel_repository_agents [ { kind: 'version_policy' "
         "parameters { key: 'policy_type' value: 'all' } } ]", ":2:29: an agent of kind version_policy does not exist: "
         "which versions are served is a field of its own; write: version_policy { all { } }"),
        ("max_batch_size: many", ":1:17: "),
        ("max_batch_size: many\ninput { dims: 'x', name: 'a' }", "; config.pbtxt:2:15: "),
        ("input { data_type: 99999999999 }", ": a value cannot be read: Value out of range"),
        ("input {", ":1:"),
        ("dynamic_batching {}\nsequence_batching {}", ":2:1: "),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where(text: str, expected: str) -> None:
    message = refusal(text)
    assert message.startswith("failed to read text proto from m/config.pbtxt:")
    assert expected in message


def test_every_spelling_of_lists_and_messages() -> None:
    texts = [
        "input [ { name: 'a' dims: [1, 2] }, { name: 'b' } ] model_warmup { inputs: { key: 'x' value: { dims: 1 } } }",
        "input: [ { name: 'a', dims: 1; dims: 2 }, { name: 'b' } ]; "
        "model_warmup [ { inputs { key: 'x' value { dims: [1] } } } ]",
        "input < name: 'a' dims: [ 1, 2 ] > input { name: 'b' } "
        "model_warmup: { inputs [ { key: 'x' value { dims: 1 } } ] }",
    ]
    first, *others = (parse_config(text, "m") for text in texts)
    assert [each.name for each in first[0].input] == ["a", "b"]
    assert others == [first, first]
    # As in Triton, the elements of a list need their commas.
    assert "m/config.pbtxt:1:23: " in refusal("input [ { name: 'a' } { name: 'b' } ]")


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ('cc_model_filenames { key: "120" value: "a" }', {"12.0": "a"}),
        ('cc_model_filenames { key: "7.5" value: "a" }', {"7.5": "a"}),
        ('cc_model_filenames { key: "75" value: "a" } cc_model_filenames { key: "7.5" value: "b" }',
         {"75": "a", "7.5": "b"}),
        ('cc_model_filenames { key: "default" value: "a" }', {"default": "a"}),
        ('cc_model_filenames { key: "" value: "a" }', {"": "a"}),
    ],
)  # fmt: skip
def test_compute_capabilities(text: str, files: dict[str, str]) -> None:
    config, notes = parse_config(text, "config.pbtxt")
    assert dict(config.cc_model_filenames) == files
    assert len(notes) == (1 if "12.0" in files else 0)


def test_accelerators_without_a_name_are_left_out_alone() -> None:
    text = """optimization { execution_accelerators {
      gpu_execution_accelerator [ { parameters { key: "a" value: "b" } }, { name: "tensorrt" } ]
      cpu_execution_accelerator { }
    } }"""
    config, notes = parse_config(text, "config.pbtxt")
    accelerators = config.optimization.execution_accelerators
    assert [each.name for each in accelerators.gpu_execution_accelerator] == ["tensorrt"]
    assert not accelerators.cpu_execution_accelerator
    assert notes == [
        "config.pbtxt:2: this gpu_execution_accelerator has no name, and is left out; write: "
        'gpu_execution_accelerator [ { name: "tensorrt" } ]',
        "config.pbtxt:3: this cpu_execution_accelerator has no name, and is left out; write: "
        'cpu_execution_accelerator [ { name: "openvino" } ]',
    ]


def test_a_scheduler_policy_of_other_backends_is_their_own_word() -> None:
    text = 'parameters { key: "scheduler_policy" value { string_value: "max_utilization" } }'
    assert parse_config(f'backend: "llm" {text}', "m")[1] == []
    assert len(parse_config(f'backend: "tensorrtllm" {text}', "m")[1]) == 1


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
        ("{name: m}", "not JSON"),
        ('{name: "m, n: 1}', "not JSON"),
    ],
)
def test_json_that_is_no_configuration(text: str, expected: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse_config_json(text)
    assert caught.value.code is ErrorCode.INVALID
    assert expected in caught.value.message
    assert "Available Fields" not in caught.value.message


def test_escape_sequences_stand_for_their_characters() -> None:
    config, notes = parse_config(r"""name: "\\x\n\x4a\101\u00e9" backend: 'a\'b\"'""", "config.pbtxt")
    assert parse_config(r'name: "a\?\\?"', "config.pbtxt")[0].name == "a?\\?"
    assert (config.name, config.backend, notes) == ("\\x\nJA\u00e9", "a'b\"", [])


def test_json_reads_bytes_as_text_does() -> None:
    config = parse_config_json('{"name": "TYPE_BYTES", "input": [{"name": "TYPE_BYTES", "data_type": "TYPE_BYTES"}]}')
    assert (config.name, config.input[0].data_type) == ("TYPE_BYTES", model_config_pb2.TYPE_STRING)


def test_json_may_leave_out_the_quotes_of_keys_as_with_triton() -> None:
    text = '{name: "a, b: \\"c", "sequence_batching": {direct : {max_queue_delay_microseconds: 5}}}'
    config = parse_config_json(text)
    assert config.name == 'a, b: "c'
    assert config.sequence_batching.direct.max_queue_delay_microseconds == 5
    assert parse_config_json(text.encode()) == config
