"""Models that load and unload others."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import LoadOverrides
from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.model import Model
from tests.serving.backends.builders import Lookup
from tests.serving.backends.python.parts import TEXT, ask, context, loaded, source_of, write_model

OTHER = """
class TritonPythonModel:
    def execute(self, requests):
        return [text("other") for _ in requests]
"""
LOADER = """
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        if not pb_utils.is_model_ready("other"):
            pb_utils.load_model("other")
        self.said = self.call()

    def call(self):
        tensor = pb_utils.Tensor("TEXT", np.array(["x"], np.object_))
        request = pb_utils.InferenceRequest(model_name="other", inputs=[tensor], requested_output_names=["TEXT"])
        response = request.exec()
        if response.has_error():
            return response.error().message()
        return response.output_tensors()[0].as_numpy()[0].decode()

    def execute(self, requests):
        return [text(getattr(self, text_of(each))()) for each in requests]

    def in_initialize(self):
        return self.said

    def ready(self):
        ready = pb_utils.is_model_ready
        return [ready("other"), ready("other", "1"), ready(model_name="other", model_version="7"), ready("nobody")]

    def with_files(self):
        files = {"file:1/model.py": b"x" * 300000, "file:labels": b""}
        pb_utils.load_model(model_name="other", config="{}", files=files)
        return "done"

    def unload(self):
        pb_utils.unload_model("other")
        return pb_utils.is_model_ready("other"), self.call()

    def unload_all(self):
        pb_utils.unload_model(model_name="other", unload_dependents=True)
        return "done"

    def errors(self):
        tried = [
            lambda: pb_utils.load_model("nobody"),
            lambda: pb_utils.unload_model("fixed"),
            lambda: pb_utils.is_model_ready("other", "latest"),
            lambda: pb_utils.load_model("other", files=["file:a"]),
            lambda: pb_utils.load_model("other", files={"1/model.py": b""}),
        ]
        return "|".join(self.error(each) for each in tried)

    def error(self, call):
        try:
            return str(call())
        except pb_utils.TritonModelException as error:
            return str(error)
"""


@dataclass
class Control:
    """A repository of one folder that loads with the backend itself."""

    folder: Path
    lookup: Lookup
    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def load(self, name: str, overrides: LoadOverrides | None = None) -> None:
        self.asked.append(("load", name, overrides))
        if name == "nobody":
            raise SluiceError(ErrorCode.INVALID, f"failed to load '{name}', failed to poll from model repository")
        if name not in self.lookup.models:
            source = source_of(self.folder / name, f'backend: "python"\n{TEXT}')
            self.lookup.models[name] = await PythonBackend().load(source, context(self.lookup, control=self))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self.asked.append(("unload", name, unload_dependents))
        if name == "fixed":
            raise SluiceError(ErrorCode.UNAVAILABLE, "explicit model load / unload is not allowed")
        await self.lookup.models.pop(name).unload()


@pytest.fixture
def control(tmp_path: Path) -> Control:
    write_model(tmp_path / "other", OTHER)
    return Control(tmp_path, Lookup())


async def load_loader(control: Control, code: str = LOADER) -> Model:
    source = write_model(control.folder / "loader", code)
    return await PythonBackend().load(source, context(control.lookup, control=control))


async def test_a_model_loads_another_brings_files_and_unloads(control: Control) -> None:
    model = await load_loader(control)
    assert control.asked == [("load", "other", LoadOverrides())]
    assert await ask(model, "in_initialize") == "other"
    assert await ask(model, "ready") == "[True, True, False, False]"
    assert (await ask(model, "errors")).split("|") == [
        "Failed to load model: failed to load 'nobody', failed to poll from model repository",
        "Failed to unload model: explicit model load / unload is not allowed",
        "Failed to check model readiness: failed to get model version from specified version string 'latest', "
        "version should be an integral value > 0",
        "failed to load model 'other', files should be a dictionary of file paths and file contents",
        "failed to load model 'other', files should be contents as bytes by 'file:PATH': '1/model.py' is not",
    ]
    control.asked.clear()
    assert await ask(model, "with_files") == "done"
    said = await ask(model, "unload")
    assert said.startswith("(False, ")
    assert "Request for unknown model: 'other' is not found" in said
    files = (("1/model.py", b"x" * 300_000), ("labels", b""))
    assert control.asked == [("load", "other", LoadOverrides("{}", files)), ("unload", "other", False)]
    await control.load("other")
    assert await ask(model, "unload_all") == "done"
    assert control.asked[-1] == ("unload", "other", True)
    for each in (model, *control.lookup.models.values()):
        await each.close()


async def test_a_model_cannot_wait_for_itself(control: Control) -> None:
    code = LOADER.replace('pb_utils.load_model("other")', "pb_utils.load_model(self.name)")
    with pytest.raises(SluiceError, match="Failed to load model: model 'loader' is being loaded, and waits for itself"):
        await load_loader(control, code)
    assert not control.asked


async def test_without_a_repository_nothing_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="Failed to load model: this server has no model repository to load from"):
        async with loaded(write_model(tmp_path / "loader", LOADER)):
            pass


async def test_nothing_can_be_asked_while_a_configuration_is_completed(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                tensor = pb_utils.Tensor("TEXT", np.array(["x"], np.object_))
                request = pb_utils.InferenceRequest(model_name="o", inputs=[tensor], requested_output_names=["TEXT"])
                reason = request.exec().error().message()
                try:
                    pb_utils.load_model("other")
                except pb_utils.TritonModelException as error:
                    raise ValueError(f"{reason}; {error}")

            def execute(self, requests): ...
    """
    said = "a model cannot ask the server while its configuration is completed"
    with pytest.raises(SluiceError, match=f"ValueError: {said}; Failed to load model: {said}"):
        await PythonBackend().complete(write_model(tmp_path / "early", code), context())
