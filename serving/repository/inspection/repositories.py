"""Every model of one or more repositories, inspected."""

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.registry import BackendRegistry
from serving.config.locations import NOWHERE
from serving.config.pbtxt import WrittenConfig
from serving.findings import ConfigFinding, error_findings
from serving.repository.inspection.ensembles import with_ensembles
from serving.repository.inspection.folder import Inspected, inspect_folder
from serving.repository.inspection.report import ModelReport
from serving.repository.namespaces import SEPARATOR
from serving.repository.roots import Found, Root, Roots
from sluice.errors import SluiceError


def inspect_repositories(
    roots: Sequence[Root], registry: BackendRegistry, *, has_namespaces: bool = False
) -> list[ModelReport]:
    """A report of each model, by name. Reads folders: for a thread.

    Raises SluiceError and OSError where a root cannot be read.
    """
    together = Roots(roots, has_namespaces=has_namespaces)
    names = together.names()
    models = {name: _inspect(together, _places(roots, name), name, registry) for name in names}
    reports = with_ensembles(models)
    return [reports[name] for name in names]


def _places(roots: Sequence[Root], name: str) -> tuple[str, ...]:
    plain = name.rpartition(SEPARATOR)[2]
    return tuple(root.place(plain) for root in roots if root.has(plain))


def _inspect(roots: Roots, places: tuple[str, ...], name: str, registry: BackendRegistry) -> Inspected:
    try:
        found = roots.open(name)
    except (SluiceError, OSError) as error:
        return _unread(name, places, error)
    if found is None:
        return _unread(name, places, FileNotFoundError(f"the folder of model '{name}' has gone"))
    try:
        place = places[0] if len(places) == 1 else str(found.folder.path)
        return _inspect_found(roots, found, name, place, registry)
    finally:
        if found.folder.let_go():
            found.folder.remove()


def _inspect_found(roots: Roots, found: Found, name: str, place: str, registry: BackendRegistry) -> Inspected:
    def member(namespace: str, step: str) -> str:
        return roots.member(found.namespace, namespace, step)

    try:
        return inspect_folder(name, found.folder, place, registry, member)
    except OSError as error:
        return _unread(name, (place,), error)


def _unread(name: str, places: tuple[str, ...], error: Exception) -> Inspected:
    found = error_findings(error) if isinstance(error, SluiceError) else (ConfigFinding(f"it cannot be read: {error}"),)
    return Inspected(ModelReport(name, places, errors=found), WrittenConfig(ModelConfig(), NOWHERE))
