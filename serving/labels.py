"""The names of the classes that an output's elements stand for."""

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig


def read_labels(config: ModelConfig, folder: Path) -> dict[str, list[str]]:
    """By output, one label a line of its `label_filename` in the model's folder. Reads files: for a thread."""
    return {
        output.name: (folder / output.label_filename).read_text(encoding="utf-8").splitlines()
        for output in config.output
        if output.label_filename
    }
