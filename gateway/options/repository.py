"""The options of `sluice serve` for a Triton model repository, under tritonserver's names."""

from dataclasses import dataclass
from pathlib import Path

from gateway.options.option import choice, integer, option, seconds, text_of, truth
from serving.repository.settings import ControlMode, RepositorySettings


def _mode(text: str) -> ControlMode:
    return ControlMode(choice(*ControlMode)(text))


def _backend_option(text: str) -> tuple[str, str, str]:
    """BACKEND,KEY=VALUE; without a backend it is for all of them."""
    backend, comma, setting = text.rpartition(",")
    key, equals, value = setting.partition("=")
    if not equals or not key.strip() or (comma and not backend.strip()):
        raise ValueError("BACKEND,KEY=VALUE, such as onnxruntime,default-max-batch-size=8")
    return backend.strip(), key.strip(), value.strip()


@dataclass(frozen=True, slots=True)
class RepositoryOptions:
    """Model repository: Triton's folders of models, served beside MODEL or instead of it"""

    paths: tuple[str, ...] = option(
        "--model-repository",
        (),
        text_of("the folder or URL of a model repository"),
        "PATH",
        "folder with one folder for each model: config.pbtxt and numbered versions; or a store: s3://BUCKET/PATH and "
        "other URLs. May be given several times",
        ("--model-store",),
        is_many=True,
    )
    control_mode: ControlMode = option(
        "--model-control-mode",
        ControlMode.NONE,
        _mode,
        "MODE",
        "none: load everything at the start. explicit: what --load-model names, then what clients load and unload. "
        "poll: follow the folders as they change; clients may then load nothing",
    )
    load: tuple[str, ...] = option(
        "--load-model",
        (),
        text_of("the name of a model, or *"),
        "NAME",
        "model to load at the start, in explicit mode; * for all. May be given several times",
        is_many=True,
    )
    poll_s: float = option(
        "--repository-poll-secs",
        15.0,
        seconds(0.1),
        "SECONDS",
        "how often the folders are looked at in poll mode. A change is taken up when two looks saw the same, so that "
        "nothing half copied is served",
    )
    is_strict_config: bool = option(
        "--disable-auto-complete-config",
        False,
        truth,
        None,
        "take configurations as they are written, and complete nothing from the model's file",
    )
    is_strictly_ready: bool = option(
        "--strict-readiness",
        True,
        truth,
        None,
        "not ready while any model that should be served cannot be. Off: ready as soon as the server takes requests",
    )
    backend_options: tuple[tuple[str, str, str], ...] = option(
        "--backend-config",
        (),
        _backend_option,
        "BACKEND,KEY=VALUE",
        "a setting for a backend. May be given several times",
        is_many=True,
        separator=";",
    )
    has_native_text_stages: bool = option(
        "--native-text-stages",
        False,
        truth,
        None,
        "serve the Python models preprocessing, postprocessing and tensorrt_llm_bls of NVIDIA's tensorrtllm_backend by "
        "Sluice's own stages of the same tensors, in the server's process",
    )
    has_namespaces: bool = option(
        "--model-namespacing",
        False,
        truth,
        "BOOL",
        "serve models of one name in several repositories side by side, as REPOSITORY::NAME",
    )
    num_parallel_loads: int = option(
        "--model-load-thread-count",
        4,
        integer(1),
        "COUNT",
        "how many versions load at a time. More shorten the start, and take memory and processors meanwhile",
    )
    num_load_retries: int = option(
        "--model-load-retry-count", 0, integer(0), "COUNT", "how often a load that fails is tried again"
    )
    cache_path: str | None = option(
        "--repository-cache-path",
        None,
        text_of("the path of a folder"),
        "PATH",
        "where models of remote stores are kept, so that the next start downloads only what has changed. Default: a "
        "temporary folder",
    )
    exits_on_error: bool = option(
        "--exit-on-error",
        False,
        truth,
        None,
        "end where a model cannot be loaded at the start. Off: serve the others, and list it with the reason",
    )

    def repository_settings(self) -> RepositorySettings:
        """The repository's part."""
        return RepositorySettings(
            num_parallel_loads=self.num_parallel_loads,
            num_load_retries=self.num_load_retries,
            cache_path=Path(self.cache_path) if self.cache_path is not None else None,
            has_namespaces=self.has_namespaces,
        )

    def by_backend(self) -> dict[str, dict[str, str]]:
        """`--backend-config` by backend and key."""
        settings: dict[str, dict[str, str]] = {}
        for backend, key, value in self.backend_options:
            settings.setdefault(backend, {})[key] = value
        return settings
