"""`sluice serve`: from arguments to a running server."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from gateway.bundled import pipeline_repository
from gateway.checkpoint import find_checkpoint, served_name
from gateway.listeners import ListenError
from gateway.options.command_line import check_accepted_flags, parse_flags
from gateway.options.config import ServeConfig, find_unknown_variables, read_config
from gateway.options.option import USAGE_ERROR, OptionError
from gateway.telemetry.logs import configure_logging
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

FAILED = 1


def command(argv: list[str]) -> int:
    """Serve models: OpenAI API and Triton v2 over HTTP, Triton v2 over gRPC, Prometheus metrics."""
    started = perf_counter()
    flags = parse_flags(argv)
    try:
        config = _with_draft_found(read_config(flags))
        advice = check_accepted_flags(flags)
        checkpoint = _checkpoint(config)
    except OptionError as error:
        return _fail(str(error), USAGE_ERROR)
    try:
        configure_logging(config.logging.lowest_level, config.logging.file)
    except OSError as error:
        return _fail(f"--log-file cannot be written: {error}", FAILED)
    _warn(advice)
    return _serve(config, checkpoint, started)


def _checkpoint(config: ServeConfig) -> Path | None:
    """The folder of MODEL; the bundled one where nothing else is to be served."""
    if config.model.path is None and config.repository.paths:
        return None
    return find_checkpoint(config.model.path, engine_python=config.tensorrt_llm.engine_python)


def _with_draft_found(config: ServeConfig) -> ServeConfig:
    """The draft model is named as the model is: a folder, a folder of versions or a name on the hub."""
    path = config.speculation.draft_model_path
    if path is None:
        return config
    found = str(find_checkpoint(path, "--draft-model"))
    return replace(config, speculation=replace(config.speculation, draft_model_path=found))


def _serve(config: ServeConfig, checkpoint: Path | None, started: float) -> int:
    from gateway.lifecycle import run_server  # what it imports is wanted only once the options are right

    try:
        with _pipeline(config, checkpoint) as whole:
            run_server(whole, checkpoint, started)
    except OptionError as error:
        return _fail(str(error), USAGE_ERROR)
    except (ListenError, SluiceError) as error:
        return _fail(str(error), FAILED)
    return 0


@contextmanager
def _pipeline(config: ServeConfig, checkpoint: Path | None) -> Iterator[ServeConfig]:
    """The configuration with the bundled pipeline among the repositories, where it is wanted."""
    is_plain = config.model.path is None and not config.repository.paths
    if not (is_plain if config.rag.is_served is None else config.rag.is_served):
        yield config
        return
    if checkpoint is None:
        raise OptionError("--rag puts the bundled pipeline around MODEL; name one beside --model-repository")
    name = served_name(config.model.served_model_name, checkpoint)
    with pipeline_repository(name, is_bundled=config.model.path is None) as path:
        repository = replace(config.repository, paths=(*config.repository.paths, path))
        model = replace(config.model, path=str(checkpoint))
        yield replace(config, model=model, repository=repository, rag=replace(config.rag, is_served=True))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice serve: error: {message}\n")
    return code


def _warn(advice: list[str]) -> None:
    for sentence in advice:
        log.warning("%s", sentence)
    for name in find_unknown_variables():
        log.warning("the variable %s is no option of sluice serve, and is ignored", name)
