"""A real S3 server, and what a test puts into a store."""

from collections.abc import Callable
from typing import Any

from moto.server import ThreadedMotoServer

from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode, RepositorySettings
from tests.serving.repository.parts import CONFIG, Bench

ALL_VERSIONS = CONFIG + "version_policy { all {} }"
POLL_S = 0.02


class Bucket:
    """Objects under one prefix, whatever the store."""

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self.filesystem = filesystem
        self.path = path
        self.url = url

    def put(self, name: str, content: str | bytes | int) -> None:
        raw = content if isinstance(content, bytes) else str(content).encode()
        self.filesystem.pipe_file(f"{self.path}/{name}", raw)

    def remove(self, name: str) -> None:
        """An object, or everything below a prefix."""
        self.filesystem.rm(f"{self.path}/{name}", recursive=True)

    def put_model(self, name: str, *stamps: str | int, config: str = CONFIG) -> None:
        self.put(f"{name}/config.pbtxt", config)
        for version, stamp in enumerate(stamps, start=1):
            self.put(f"{name}/{version}/stamp.txt", stamp)


class StoreBench(Bench):
    """A repository over the roots of stores."""

    def __init__(self, *urls: Any) -> None:
        super().__init__(*urls)

    def repository(self, mode: ControlMode = ControlMode.EXPLICIT, **options: Any) -> ModelRepository:
        settings = RepositorySettings(store_rest_s=0.0, **options.pop("settings", {}))
        return super().repository(mode, settings=settings, poll_s=POLL_S, **options)


def stamps(repository: ModelRepository) -> dict[str, list[int]]:
    """Return the stamps of the versions that serve, by model."""
    found: dict[str, list[int]] = {}
    for model in repository.models():
        found.setdefault(model.name, []).append(model.stamp)  # type: ignore[attr-defined]
    return found


class HookedFilesystem:
    """A real filesystem whose calls a test sees first."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.before_get: Callable[[str], None] = lambda path: None
        self.before_find: Callable[[str], None] = lambda path: None

    def get_file(self, path: str, *args: Any, **options: Any) -> Any:
        self.before_get(path)
        return self._inner.get_file(path, *args, **options)

    def find(self, path: str, **options: Any) -> Any:
        self.before_find(path)
        return self._inner.find(path, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class S3Server:
    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()
        self.endpoint = f"http://{self.host}:{self.port}"

    def stop(self) -> None:
        self._server.stop()
