"""`auto_complete_config`, and models that cannot be loaded."""

from pathlib import Path
from textwrap import dedent

import pytest
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.backends.python.worker.model_config import ModelConfig as WorkerConfig
from sluice.serving.config.config_json import config_json
from sluice.serving.spec import ModelSource
from tests.serving.backends.python.parts import (
    REFERENCE_MODELS,
    TEXT,
    ask,
    children,
    context,
    loaded,
    source_of,
    write_model,
)


async def complete(source: ModelSource) -> ModelConfig:
    return await PythonBackend().complete(source, context())


async def load(source: ModelSource) -> None:
    async with loaded(source):
        pass


def completing(*lines: str) -> str:
    body = "\n".join(f"                    {line}" for line in lines)
    return dedent(
        f"""
            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(c):
{body}
                    return c

                def execute(self, requests):
                    return [text("x") for _ in requests]
        """
    )


async def test_a_model_without_a_configuration_completes_its_own() -> None:
    config = await complete(source_of(REFERENCE_MODELS / "autoconf", 'backend: "python"'))
    assert config.max_batch_size == 2
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input] == [
        ("IN", DataType.TYPE_INT64, [-1])
    ]
    assert [each.name for each in config.output] == ["OUT"]
    assert config.HasField("dynamic_batching")


async def test_everything_that_can_be_completed(tmp_path: Path) -> None:
    lines = (
        'assert c.as_dict()["name"] == "full"',
        "c.set_max_batch_size(4)",
        'c.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": (1,), "optional": False})',
        'c.add_input({"name": "MORE", "data_type": "TYPE_FP32", "dims": [2], "optional": True})',
        'c.add_output({"name": "ALSO", "data_type": "TYPE_FP32", "dims": [3]})',
        "c.set_dynamic_batching()",
        'c.set_model_transaction_policy({"decoupled": True})',
    )
    config = await complete(write_model(tmp_path / "full", completing(*lines)))
    assert [(each.name, each.optional) for each in config.input] == [("TEXT", False), ("MORE", True)]
    assert [each.name for each in config.output] == ["TEXT", "ALSO"]
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")
    assert config.model_transaction_policy.decoupled


CONTRADICTIONS: dict[str, tuple[str, str, str]] = {
    "another type": (
        'add_input({"name": "TEXT", "data_type": "TYPE_INT32", "dims": [1]})',
        "",
        "unable to load model 'bad', configuration expects datatype TYPE_STRING for input 'TEXT', model provides "
        "TYPE_INT32",
    ),
    "other dims": (
        'add_output({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [2]})',
        "",
        "model 'bad', tensor 'TEXT': the model expects dims [2] but the model configuration specifies dims [1]",
    ),
    "an input that is optional": (
        'add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1], "optional": True})',
        "",
        "the model expects optional True but the model configuration specifies optional False",
    ),
    "a property of an input": (
        'add_input({"name": "A", "data_type": "TYPE_INT32", "dims": [1], "format": 1})',
        "",
        "input 'A' in auto-complete-config function for model 'bad' contains property other than 'name', 'data_type', "
        "'dims' and 'optional'.",
    ),
    "a property of an output": (
        'add_output({"name": "A", "data_type": "TYPE_INT32", "dims": [1], "optional": True})',
        "",
        "output 'A' in auto-complete-config function for model 'bad' contains property other than 'name', 'data_type' "
        "and 'dims'.",
    ),
    "no type": ('add_input({"name": "A", "dims": [1]})', "", "is missing 'data_type' property"),
    "no name": (
        'add_output({"dims": [1]})',
        "",
        "output in auto-complete-config function for model 'bad' is missing 'name'",
    ),
    "a smaller batch": (
        "set_max_batch_size(2)",
        "max_batch_size: 4",
        "configuration specified max_batch_size 4, but in auto-complete-config function for model 'bad' specified "
        "max_batch_size 2",
    ),
    "batches of sequences": (
        "set_dynamic_batching()",
        "sequence_batching {}",
        "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for model "
        "'bad' tries to set scheduling_choice as 'dynamic_batching'",
    ),
    "a model that streams": (
        'set_model_transaction_policy({"decoupled": False})',
        "model_transaction_policy { decoupled: true }",
        "trying to change decoupled property in auto-complete-config for model 'bad', which is already set to 'True'.",
    ),
    "a property of the policy": (
        'set_model_transaction_policy({"x": 1})',
        "",
        "contains property other than 'decoupled'.",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_said_in_tritons_words(tmp_path: Path, case: str) -> None:
    call, text, said = CONTRADICTIONS[case]
    given = WorkerConfig(config_json(source_of(tmp_path / "bad", f'backend: "python" {text} {TEXT}').config).decode())
    with pytest.raises(ValueError) as caught:
        eval(f"given.{call}", {"given": given})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("c.set_max_batch_size(-1)", "ValueError: configuration specified max_batch_size 0"),
        ("c = None", "auto_complete_config function in model 'bad' must return a valid pb.ModelConfig object."),
        ("os._exit(3)", "Stub process 'bad' is not healthy."),
    ],
)
async def test_a_completion_that_fails_says_why(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(SluiceError) as caught:
        await complete(write_model(tmp_path / "bad", completing(line)))
    assert caught.value.code is ErrorCode.INTERNAL
    assert said in caught.value.message
    assert not children()


UNLOADABLE = {
    "import": (
        "import nosuchmodule\n",
        "ModuleNotFoundError: No module named 'nosuchmodule'\n\nAt:\n  {file}(1): <module>\n",
    ),
    "execute": ("class TritonPythonModel:\n    pass\n", "has no method 'execute'"),
    "initialize": (
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        self.go()\n"
        "    def go(self):\n"
        "        raise RuntimeError('cannot start')\n"
        "    def execute(self, requests): ...\n",
        "RuntimeError: cannot start\n\nAt:\n  {file}(5): go\n  {file}(3): initialize\n",
    ),
    "exit": (
        "import os\nclass TritonPythonModel:\n"
        "    def initialize(self, args):\n        os._exit(7)\n    def execute(self, requests): ...\n",
        "Stub process 'exit_0' is not healthy.",
    ),
}


@pytest.mark.parametrize("name", UNLOADABLE)
async def test_what_cannot_be_loaded_says_why(tmp_path: Path, name: str) -> None:
    code, said = UNLOADABLE[name]
    source = write_model(tmp_path / name, code, prelude="")
    with pytest.raises(SluiceError) as caught:
        await load(source)
    assert caught.value.code is ErrorCode.INTERNAL
    assert said.format(file=source.model_file) in caught.value.message
    assert not children()


async def test_no_instance_is_left_when_one_fails(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args):
                if args["model_instance_name"].endswith("_1"):
                    raise RuntimeError("not me")

            def execute(self, requests): ...
    """
    with pytest.raises(SluiceError, match="RuntimeError: not me"):
        await load(write_model(tmp_path / "some", code, "instance_group { count: 3 }" + TEXT))
    assert not children()


async def test_the_model_file_may_have_another_name(tmp_path: Path) -> None:
    code = (
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [text('other') for _ in requests]\n"
    )
    source = write_model(tmp_path / "named", code, 'default_model_filename: "other.py"' + TEXT)
    with pytest.raises(SluiceError, match="does not exist"):
        await load(source)
    source.model_file.with_name("model.py").rename(source.model_file)
    async with loaded(source) as model:
        assert await ask(model, "") == "other"
