"""What is checked once everything is loaded."""

import logging
from typing import TYPE_CHECKING

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.serving import RepositoryOptions
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.settings import ControlMode

if TYPE_CHECKING:  # imported for real while the engine loads
    from sluice.gateway.service import InferenceService

log = logging.getLogger(__name__)


def check_start(service: "InferenceService", options: RepositoryOptions) -> None:
    """Warn of what is most likely a mistake. Raises UNAVAILABLE and INVALID for what cannot be meant so."""
    _check_loaded(service, options)
    _check_routes(service, options)
    if options.paths and options.control_mode is ControlMode.NONE and not service.repository.index():
        log.warning("there is no model in %s; without --model-control-mode none can come", ", ".join(options.paths))


def _check_loaded(service: "InferenceService", options: RepositoryOptions) -> None:
    """Raise UNAVAILABLE for a model of the repository that failed to load, with --exit-on-error."""
    failed = [entry for entry in service.repository.index() if entry.state is ModelState.UNAVAILABLE]
    if failed and options.exits_on_error:
        reasons = "; ".join(f"{entry.name} version {entry.version}: {entry.reason}" for entry in failed)
        raise SluiceError(ErrorCode.UNAVAILABLE, f"not everything could be loaded (--exit-on-error): {reasons}")


def _check_routes(service: "InferenceService", options: RepositoryOptions) -> None:
    """Raise INVALID for routes that never can answer: those over models which stay as they are. Where models come
    and go, say so in the log."""
    try:
        service.routes.check(lambda name: any(entry.name == name for entry in service.repository.index()))
    except SluiceError as error:
        if options.control_mode is ControlMode.NONE:
            raise
        log.warning("%s", error.message)
