"""Carries out `sluice fleet` in a Ray cluster: it asks the fleet's controller, which is an actor there."""

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from sluice.cli.errors import CommandError
from sluice.cli.fleet.controller import NAMESPACE, FleetReport, FleetSpec, find_controller, start_controller, state_file

ANSWER_S = 60.0
"""Seconds that a controller may take to start and to answer."""
LOOK_S = 0.5
LOCAL = "local"


class FleetSessionError(CommandError):
    """The cluster or the fleet does not do what it was asked to. The text is one line for the operator."""


def connect(address: str, *, starts: bool) -> None:
    """Join the cluster at `address`. One called local is started on this machine if it `starts` and there is none.
    Raises FleetSessionError."""
    if address == LOCAL:
        if starts and not _join("auto"):
            _start_local()
        address = "auto"
    if not ray.is_initialized() and not _join(address):
        raise FleetSessionError(f"there is no Ray cluster at {address}; `ray start --head` or --ray local starts one")


def _join(address: str) -> bool:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RayError, ValueError, RuntimeError):
        return False
    return True


def _start_local() -> None:
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0")
    quiet = ("--include-dashboard=false", "--disable-usage-stats")
    done = subprocess.run((*command, *quiet), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise FleetSessionError(f"Ray could not be started: {''.join(last)}")


def up(fields: dict[str, Any]) -> FleetReport:
    """Start a fleet of these fields of `FleetSpec`, and return while it is being placed. Raises FleetSessionError where
    it runs already."""
    spec = FleetSpec(**fields)
    message = f"a fleet called {spec.name} runs already; `sluice fleet scale` changes its size"
    if _is_running(spec.name):
        raise FleetSessionError(message)
    # A cluster that went away as a whole has left them.
    state_file(spec).unlink(missing_ok=True)
    Path(spec.members_file).unlink(missing_ok=True)
    try:
        controller = start_controller(spec)
    except ValueError:
        raise FleetSessionError(message) from None
    started: FleetReport = _ask(controller, "report")
    return started


def report(name: str) -> FleetReport:
    """Return the report of the fleet's controller. Raises FleetSessionError."""
    found: FleetReport = _ask(_controller(name), "report")
    return found


def scale(name: str, replicas: int) -> None:
    """Set the number of engines. Raises FleetSessionError."""
    _ask(_controller(name), "scale", replicas)


def down(name: str, timeout_s: float) -> None:
    """Drain the engines for at most `timeout_s`, then end them and the fleet. Raises FleetSessionError."""
    controller = _controller(name)
    _ask(controller, "end")
    deadline = time.monotonic() + timeout_s
    while _ask(controller, "report").engines and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    _ask(controller, "kill")
    ray.kill(controller)


def _is_running(name: str) -> bool:
    try:
        find_controller(name)
    except ValueError:
        return False
    return True


def _controller(name: str) -> Any:
    try:
        return find_controller(name)
    except ValueError:
        raise FleetSessionError(f"there is no fleet called {name}; `sluice fleet up` starts one") from None


def _ask(controller: Any, method: str, *arguments: object) -> Any:
    """Call a method of the controller and return its result. It may be called twice: a call that meets a controller
    which is being restarted is made again. Raises FleetSessionError."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            return ray.get(getattr(controller, method).remote(*arguments), timeout=ANSWER_S)
        except RayError as error:
            if not isinstance(error, ActorUnavailableError) or time.monotonic() > deadline:
                first_line = str(error).strip().partition("\n")[0]
                raise FleetSessionError(f"the fleet's controller does not answer: {first_line}") from None
        time.sleep(LOOK_S)
