"""`sluice dynamo-worker`: serves a model as a worker of NVIDIA Dynamo, under its front end and its router."""

import sys
from importlib.util import find_spec

from sluice.errors import SluiceError
from sluice.gateway.checkpoint import find_checkpoint, served_name
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import GROUPS, ServeConfig, read_config, read_group
from sluice.gateway.options.dynamo import DynamoOptions
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError
from sluice.gateway.telemetry.logs import configure_logging
from sluice.log_lines import JSON

_GROUPS = ("model", "scheduling", "cache", "speculation", "tensorrt_llm", "shutdown", "logging")
"""Groups of the options of `sluice serve` that belong to an engine."""
_DESCRIPTION = """\
Serve a model as a worker of NVIDIA Dynamo: its front end speaks HTTP, tokenizes and routes, this engine batches and
generates. Several workers of one model share a namespace and a component.
"""
_EPILOG = """\
Dynamo's libraries are an extra, and its Python part comes without what it depends on:
  pip install 'sluice[dynamo]' && pip install --no-deps ai-dynamo==1.6.1

examples:
  sluice dynamo-worker /models/Qwen3-0.6B
  python -m dynamo.frontend --router-mode kv --discovery-backend file --request-plane tcp --event-plane zmq

Exit codes: 0 after a clean shutdown, 1 where the worker could not start, 2 for a bad option.
"""


def command(argv: list[str]) -> int:
    """Serve a model as a worker of NVIDIA Dynamo, under its front end and its router."""
    try:
        config, dynamo = _parse(argv)
        if missing := _missing():
            return _fail(missing, FAILED)
        checkpoint = find_checkpoint(config.model.path, engine_python=config.tensorrt_llm.engine_python)
        engine = config.engine(str(checkpoint))
    except OptionError as error:
        return _fail(str(error), USAGE_ERROR)
    logging = config.logging
    configure_logging(logging.lowest_level, logging.file, is_json=logging.time_format == JSON)
    from sluice.gateway.dynamo.worker import serve_worker

    try:
        name = served_name(config.model.served_model_name, checkpoint)
        serve_worker(engine, name, dynamo, config.shutdown.heartbeat_timeout_s)
    except SluiceError as error:
        return _fail(str(error), FAILED)
    return 0


def _parse(argv: list[str]) -> tuple[ServeConfig, DynamoOptions]:
    """Parse the command line. Raises OptionError; exits where it cannot be understood."""
    parser = OneLineParser(
        prog="sluice dynamo-worker",
        usage="sluice dynamo-worker [MODEL] [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_options(parser, (DynamoOptions, *(GROUPS[name] for name in _GROUPS)))
    flags = {flag: value for flag, value in vars(parser.parse_args(argv)).items() if value is not None}
    return read_config(flags), read_group(DynamoOptions, flags)


def _missing() -> str:
    """Return what to install; "" where Dynamo is there."""
    if find_spec("dynamo") is None or find_spec("dynamo._core") is None:
        return "Dynamo's runtime is not installed: pip install 'sluice[dynamo]'"
    if find_spec("dynamo.common") is None:
        return "Dynamo's Python part is not installed: pip install --no-deps ai-dynamo==1.6.1"
    return ""


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice dynamo-worker: error: {message}\n")
    return code
