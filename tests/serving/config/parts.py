"""Configurations for tests, with the notes on what was read other than written."""

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.config.pbtxt import finding_lines, parse_pbtxt, read_pbtxt


def parse_config(text: str, path: Path | str) -> tuple[ModelConfig, list[str]]:
    """Return the configuration and its notes, one line each. `path` is named in errors."""
    written = parse_pbtxt(text, path)
    return written.config, finding_lines(written.notes, Path(path).name)


def read_config(path: Path) -> tuple[ModelConfig, list[str]]:
    """Return the configuration in a file and its notes, one line each."""
    written = read_pbtxt(path)
    return written.config, finding_lines(written.notes, path.name)
