"""`sluice serve`: reads the options and runs the server."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from sluice.cli.errors import CommandError, reports_errors
from sluice.gateway.bundled import pipeline_repository
from sluice.gateway.checkpoint import find_checkpoint, served_name
from sluice.gateway.front.listeners import ListenError
from sluice.gateway.options.command_line import check_accepted_flags, parse_flags
from sluice.gateway.options.config import ServeConfig, find_unknown_variables, read_config
from sluice.gateway.options.option import OptionError
from sluice.gateway.options.telemetry import LoggingOptions
from sluice.gateway.process_settings import raise_file_limit
from sluice.gateway.telemetry.logs import configure_logging
from sluice.log_lines import JSON

log = logging.getLogger(__name__)


@reports_errors("sluice serve", ListenError)
def command(argv: list[str]) -> int:
    """Serve models: OpenAI API and Triton v2 over HTTP, Triton v2 over gRPC, Prometheus metrics."""
    started = perf_counter()
    flags = parse_flags(argv)
    config = resolve_draft_model(read_config(flags))
    advice = check_accepted_flags(flags)
    checkpoint = _find_model(config)
    start_log(config.logging)
    if "--api-key" in flags:
        advice = [*advice, "--api-key: every user of this machine can read the key there; use --api-key-file"]
    _warn(advice)
    _serve(config, checkpoint, started)
    return 0


def start_log(options: LoggingOptions) -> None:
    """Begin the log of this process. Raises CommandError for a file that cannot be written."""
    try:
        configure_logging(options.lowest_level, options.file, is_json=options.time_format == JSON)
    except OSError as error:
        raise CommandError(f"--log-file cannot be written: {error}") from None


def _find_model(config: ServeConfig) -> Path | None:
    """Return the folder of MODEL: the bundled model where no model and no repository is named."""
    if config.model.path is None and config.repository.paths:
        return None
    engine_python, has_engine = config.tensorrt_llm.engine_python, config.fleet.engines is None
    return find_checkpoint(config.model.path, engine_python=engine_python, has_engine=has_engine)


def resolve_draft_model(config: ServeConfig) -> ServeConfig:
    """Replace --draft-model by its folder. It is named as MODEL is: a folder, a folder of versions or a hub name."""
    path = config.speculation.draft_model_path
    if path is None:
        return config
    found = str(find_checkpoint(path, "--draft-model"))
    return replace(config, speculation=replace(config.speculation, draft_model_path=found))


def _serve(config: ServeConfig, checkpoint: Path | None, started: float) -> None:
    # Imports make objects that stay, and no garbage: collections would take a seventh of their time. The server enables
    # them when it is assembled.
    gc.disable()
    from sluice.gateway.lifecycle import run_server  # imported late: bad options are reported without its imports

    try:
        raise_file_limit()
        with bundled_pipeline(config, checkpoint) as complete:
            run_server(complete, checkpoint, started)
    finally:
        gc.enable()


@contextmanager
def bundled_pipeline(config: ServeConfig, checkpoint: Path | None) -> Iterator[ServeConfig]:
    """Yield the configuration, with the bundled RAG pipeline among the repositories where it is to be served."""
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


def _warn(advice: list[str]) -> None:
    for sentence in advice:
        log.warning("%s", sentence)
    for name in find_unknown_variables():
        log.warning("the variable %s is no option of sluice serve, and is ignored", name)
