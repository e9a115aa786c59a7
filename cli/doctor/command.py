"""`sluice doctor`: its command line, and the run over machine and models."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from sluice.cli.doctor.facts import MachineFacts
from sluice.cli.doctor.findings import DoctorFinding, findings_json, print_findings
from sluice.cli.doctor.live import diagnose
from sluice.cli.doctor.machine import read_machine
from sluice.cli.doctor.machine_checks import check_machine
from sluice.cli.doctor.model_checks import ServingOptions, check_model
from sluice.cli.doctor.models import read_model
from sluice.cli.doctor.targets import ModelTarget, find_targets
from sluice.cli.live.server import RunningServer, ServerError
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.runtimes import RuntimeChoice, choose_runtime
from sluice.errors import SluiceError
from sluice.gateway.live.findings import Severity
from sluice.gateway.options.config import read_client_options
from sluice.gateway.options.option import (
    FAILED,
    USAGE_ERROR,
    OneLineParser,
    OptionError,
    argument_type,
    integer,
    seconds,
)

_OVERVIEW = """\
Check this machine, its libraries and the models to be served. The report lists what will not work, what will work
badly, and what to do. Nothing is loaded, changed or downloaded.

Without a MODEL only the machine is checked: processor, memory, disk, ports, GPUs, driver, CUDA, libraries.

With --live URL a running server is watched for some seconds instead, and the report says what bounds it (its queue, the
KV cache, prefill, compute, the gateway, an instance of a model, a quota, a lost replica) and which option to turn.
"""

_EPILOG = """\
examples:
  sluice doctor                                          check this machine
  sluice doctor /models/llama-3.1-8b                     check whether this model runs here, and on which runtime
  sluice doctor /models/llama-3.1-70b --tensor-parallel-size 4 --runtime tensorrt_llm
  sluice doctor /model-repository                        check every language model of a repository
  sluice doctor --live http://127.0.0.1:8000             what bounds this running server?
  sluice doctor --live http://10.0.0.7:8000 --seconds 30 --json
  sluice doctor --json | jq '.findings[] | select(.level == "fail")'

Memory is estimated from the size of the weights' files, two GiB of each GPU for the runtime, and the KV cache in what
is left.

Exit codes: 0 where all will work, 1 where something will not, 2 for a bad option or a MODEL that is none. With --live:
1 for a server that cannot be asked, takes no requests or has lost an engine, 0 for all else.
"""


def command(argv: list[str]) -> int:
    """Check this machine, its libraries and models, and report what will not work and what to do."""
    arguments = parse_arguments(argv)
    if arguments.live is not None:
        return _diagnose(arguments)
    try:
        targets = [target for path in arguments.models for target in find_targets(path, _engine_config(arguments))]
        findings = list(_check(arguments, targets))
    except SluiceError as error:
        sys.stderr.write(f"sluice doctor: error: {error.message}\n")
        return USAGE_ERROR
    if arguments.json:
        sys.stdout.write(findings_json(findings).decode() + "\n")
    else:
        print_findings(findings, Console())
    return FAILED if any(finding.level is Severity.FAIL for finding in findings) else 0


def _diagnose(arguments: argparse.Namespace) -> int:
    """Judge a running server."""
    given = {"--url": arguments.live, "--api-key": arguments.api_key}
    try:
        if arguments.models:
            raise OptionError("--live watches a server: leave MODEL out")
        options = read_client_options({flag: value for flag, value in given.items() if value is not None})
        server = RunningServer(options.url, options.api_key, arguments.metrics_url)
        return diagnose(server, arguments.seconds, is_json=arguments.json)
    except OptionError as error:
        sys.stderr.write(f"sluice doctor: error: {error}\n")
        return USAGE_ERROR
    except ServerError as error:
        sys.stderr.write(f"sluice doctor: error: {error}\n")
        return FAILED


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model_path="",
        runtime=arguments.runtime,
        tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_model_len=arguments.max_model_len,
        engine_python=arguments.engine_python,
    )


def _check(arguments: argparse.Namespace, targets: list[ModelTarget]) -> Iterator[DoctorFinding]:
    ports = (arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    cache_folder = Path(arguments.cache_path).expanduser()
    machine = read_machine(arguments.host, ports, cache_folder, arguments.engine_python)
    yield from check_machine(machine, _required_runtime(arguments.runtime, targets))
    for target in targets:
        yield from _check_target(target, machine)


def _required_runtime(requested: Runtime, targets: list[ModelTarget]) -> Runtime:
    """Return the runtime that the machine must support: one with GPUs where a model needs it, else `requested`."""
    configs = [(target, target.config) for target in targets if not isinstance(target.config, DoctorFinding)]
    choices = [target.choice or _choose_runtime(config) for target, config in configs]
    specs = [choice.spec for choice in choices if isinstance(choice, RuntimeChoice)]
    return next((spec.runtime for spec in specs if spec.min_capability), requested)


def _check_target(target: ModelTarget, machine: MachineFacts) -> Iterator[DoctorFinding]:
    if isinstance(target.config, DoctorFinding):
        yield target.config
        return
    config = target.config
    num_gpus = config.tensor_parallel_size * config.pipeline_parallel_size
    try:
        model = read_model(target.name, Path(config.model_path), target.tokenizer, num_gpus=num_gpus)
    except SluiceError as error:
        yield DoctorFinding(Severity.FAIL, target.name, error.message)
        return
    options = ServingOptions(num_gpus, config.quantization, config.kv_cache_dtype, config.max_model_len, config.device)
    yield from check_model(model, machine, target.choice or _choose_runtime(config), options)


def _choose_runtime(config: EngineConfig) -> RuntimeChoice | SluiceError:
    try:
        return choose_runtime(config)
    except SluiceError as error:
        return error


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits the process for bad arguments and after --help."""
    parser = OneLineParser(
        prog="sluice doctor",
        usage="sluice doctor [OPTIONS] [MODEL...]",
        description=_OVERVIEW,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folder of a checkpoint, an IR, a compiled engine or a model repository, or ORG/NAME of the hub's cache",
    )
    parser.add_argument(
        "--runtime",
        type=Runtime,
        choices=list(Runtime),
        default=Runtime.AUTO,
        help="runtime that is to serve the models. Default: auto",
    )
    _add_live(parser)
    _add_sizes(parser)
    _add_addresses(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object to standard output")
    return parser.parse_args(argv)


def _add_live(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a running server")
    group.add_argument("--live", metavar="URL", help="watch the server at this address, and say what bounds it")
    group.add_argument(
        "--seconds",
        type=argument_type(seconds(0.1)),
        default=5.0,
        metavar="SECONDS",
        help="how long it is watched. Default: 5",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="a key of the groups metrics and inference, where the server asks for one. Better set SLUICE_API_KEY: "
        "every user of the machine can read a command line",
    )
    group.add_argument("--metrics-url", metavar="URL", help="address of its metrics. Default: as the server says")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how a MODEL is to be served; as for `sluice serve`")
    group.add_argument("--tensor-parallel-size", "--tp-size", type=argument_type(integer(1)), default=1, metavar="N")
    group.add_argument("--pipeline-parallel-size", "--pp-size", type=argument_type(integer(1)), default=1, metavar="N")
    group.add_argument("--quantization", default="none", metavar="TYPE")
    group.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE")
    group.add_argument(
        "--engine-python",
        metavar="PYTHON",
        help="Python that vLLM or TensorRT-LLM is installed for, where it is not this one",
    )
    group.add_argument("--max-model-len", type=argument_type(integer(1)), metavar="TOKENS")


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the server is to listen and keep its cache")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS")
    group.add_argument("--http-port", type=int, default=8000, metavar="PORT")
    group.add_argument("--grpc-port", type=int, default=8001, metavar="PORT")
    group.add_argument("--metrics-port", type=int, default=8002, metavar="PORT")
    group.add_argument("--cache-path", default="~/.cache/sluice", metavar="FOLDER")
