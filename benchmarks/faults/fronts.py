"""Gateways of others, which compute nothing: each in front of two servers of llama.cpp."""

import json
from pathlib import Path

from benchmarks.faults.server import MODEL, Adapter, Launch
from benchmarks.figures import ReportProgress
from benchmarks.offline.environments import Environment, interpreter
from benchmarks.routing.peers import SMG

LITELLM = Environment("litellm", "litellm", "1.105.7", ("litellm[proxy]==1.105.7",))
OFFLINE = ("env", "LITELLM_LOCAL_MODEL_COST_MAP=True")
"""It would look for prices elsewhere at its start, again and again."""


def smg(behind: Adapter, folder: Path, report: ReportProgress) -> Adapter:
    """Return smg, the router of SGLang's makers."""
    program = interpreter(SMG, folder / "envs", report).with_name("smg")

    def command(launch: Launch) -> list[str | Path]:
        address = ("--host", "127.0.0.1", "--port", str(launch.port), "--prometheus-port", str(launch.metrics_port))
        return [program, "launch", "--worker-urls", *launch.behind, *address, "--log-level", "warn"]

    return Adapter("smg", "smg before two llama.cpp", SMG.version, command, behind=behind, fields=behind.fields)


def litellm(behind: Adapter, folder: Path, report: ReportProgress) -> Adapter:
    """Return LiteLLM's proxy."""
    program = interpreter(LITELLM, folder / "envs", report).with_name("litellm")

    def command(launch: Launch) -> list[str | Path]:
        config = launch.folder / f"litellm-{launch.port}.json"  # YAML reads JSON
        config.parent.mkdir(parents=True, exist_ok=True)
        general = {"dangerously_permit_weak_or_unset_master_key": True}  # it asks for a key otherwise, on loopback too
        models = [_deployment(url) for url in launch.behind]
        config.write_text(json.dumps({"model_list": models, "general_settings": general}))
        return [
            *OFFLINE,
            program,
            "--config",
            config,
            "--host",
            "127.0.0.1",
            "--port",
            str(launch.port),
            "--telemetry",
            "False",
        ]

    return Adapter(
        key="litellm",
        name="LiteLLM before two llama.cpp",
        version=LITELLM.version,
        command=command,
        health="/health/readiness",  # its /health asks the models, each time
        fields=behind.fields,
        behind=behind,
    )


def _deployment(url: str) -> dict[str, object]:
    parameters = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    return {"model_name": MODEL, "litellm_params": parameters}
