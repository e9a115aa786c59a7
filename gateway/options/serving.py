"""Options of serving models: the model repository, model instances, and the response cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.errors import SluiceError
from sluice.gateway.options.option import (
    OptionError,
    choice,
    enum_member,
    integer,
    option,
    printable_text,
    seconds,
    size,
    truth,
)
from sluice.serving.repository.settings import ControlMode, RepositorySettings

if TYPE_CHECKING:
    from sluice.serving.caching.settings import CacheSettings

OFF, BY_EXECUTIONS = "off", "execution_count"


def _parse_backend_option(text: str) -> tuple[str, str, str]:
    """Parse BACKEND,KEY=VALUE. Without a backend the setting is for all of them."""
    backend, comma, setting = text.rpartition(",")
    key, equals, value = setting.partition("=")
    if not equals or not key.strip() or (comma and not backend.strip()):
        raise ValueError("BACKEND,KEY=VALUE, such as onnxruntime,default-max-batch-size=8")
    return backend.strip(), key.strip(), value.strip()


def _parse_config_name(text: str) -> str:
    if not text or not text.isprintable() or " " in text or "/" in text:
        raise ValueError("the name of a file without its .pbtxt, with no space in it")
    return text


def _poll_seconds(text: str) -> float:
    try:
        return float(seconds(0.0 if text == "0" else 0.1)(text))
    except ValueError as error:
        raise ValueError(f"{error}, or 0") from None


@dataclass(frozen=True, slots=True)
class RepositoryOptions:
    """Model repository: Triton's folders of models, served beside MODEL or instead of it"""

    paths: tuple[str, ...] = option(
        "--model-repository",
        (),
        printable_text("the folder or URL of a model repository"),
        "PATH",
        "folder with one folder for each model: config.pbtxt and numbered versions; or a store: s3://BUCKET/PATH and "
        "other URLs. May be given several times",
        ("--model-store",),
        is_many=True,
    )
    control_mode: ControlMode = option(
        "--model-control-mode",
        ControlMode.NONE,
        enum_member(ControlMode),
        "MODE",
        "none: load everything at the start. explicit: what --load-model names, then what clients load and unload. "
        "poll: follow the folders as they change; clients may then load nothing",
    )
    load: tuple[str, ...] = option(
        "--load-model",
        (),
        printable_text("the name of a model, or *"),
        "NAME",
        "model to load at the start, in explicit mode; * for all. May be given several times",
        is_many=True,
    )
    takes_model_files: bool = option(
        "--allow-model-file-override",
        False,
        truth,
        "BOOL",
        "let clients that may load models bring a model's files in the request (file:PATH). Such files may be code: "
        "whoever may send them runs commands as the server's user",
    )
    poll_s: float = option(
        "--repository-poll-secs",
        15.0,
        _poll_seconds,
        "SECONDS",
        "seconds between two looks at the folders in poll mode; 0 looks at the start only. A change is taken up when "
        "two looks saw the same, so that nothing half copied is served",
    )
    config_name: str = option(
        "--model-config-name",
        "",
        _parse_config_name,
        "NAME",
        "models that have configs/NAME.pbtxt in their folder are configured by it instead of config.pbtxt",
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
        _parse_backend_option,
        "BACKEND,KEY=VALUE",
        "a setting for a backend. May be given several times",
        is_many=True,
        separator=";",
    )
    backend_directory: str | None = option(
        "--backend-directory",
        None,
        printable_text("the path of a folder"),
        "PATH",
        "folder with Triton's Python-based backends: NAME/model.py serves the models whose configuration says "
        "backend: NAME. Names of Sluice's own backends stay theirs",
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
        "most versions that load at a time. More shorten the start, and take memory and processors meanwhile",
    )
    num_load_retries: int = option(
        "--model-load-retry-count", 0, integer(0), "COUNT", "most retries of a load that fails"
    )
    cache_path: str | None = option(
        "--repository-cache-path",
        None,
        printable_text("the path of a folder"),
        "PATH",
        "folder of the models of remote stores, so that the next start downloads only changes. Default: a temporary "
        "folder",
    )
    exits_on_error: bool = option(
        "--exit-on-error",
        False,
        truth,
        None,
        "end where a model cannot be loaded at the start. Off: serve the others, and list it with the reason",
    )

    def repository_settings(self) -> RepositorySettings:
        """Return the repository's own settings."""
        return RepositorySettings(
            num_parallel_loads=self.num_parallel_loads,
            num_load_retries=self.num_load_retries,
            cache_path=Path(self.cache_path) if self.cache_path is not None else None,
            has_namespaces=self.has_namespaces,
            config_name=self.config_name,
        )

    def by_backend(self) -> dict[str, dict[str, str]]:
        """Return the values of `--backend-config` by backend and key."""
        settings: dict[str, dict[str, str]] = {}
        for backend, key, value in self.backend_options:
            settings.setdefault(backend, {})[key] = value
        return settings


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """Instances: what the copies of models may take together, and which processors they keep to"""

    rate_limit: str = option(
        "--rate-limit",
        OFF,
        choice(BY_EXECUTIONS, OFF),
        "MODE",
        "execution_count: an instance runs when the resources of its rate_limiter are free, and who has run least "
        "comes first. off: whenever it is idle",
    )
    resources: tuple[str, ...] = option(
        "--rate-limit-resource",
        (),
        printable_text("NAME:COUNT or NAME:COUNT:DEVICE, such as memory:4"),
        "NAME:COUNT[:DEVICE]",
        "amount of a resource, in all or on one device. Where none is given, the most that any instance asks for. "
        "May be given several times",
        is_many=True,
    )
    host_policies: tuple[str, ...] = option(
        "--host-policy",
        (),
        printable_text("NAME,SETTING=VALUE, such as fast,cpu-cores=0-3"),
        "NAME,SETTING=VALUE",
        "cpu-cores=0-3,8 or numa-node=0 for the instances of groups with that host_policy; 'cpu' is for all others on "
        "the CPU, 'gpu_0' for those on that GPU. May be given several times",
        is_many=True,
        separator=";",
    )


@dataclass(frozen=True, slots=True)
class ResponseCacheOptions:
    """Response cache: answers of models with response_cache, for equal requests. Default: 16M for each such model"""

    settings: tuple[str, ...] = option(
        "--cache-config",
        (),
        printable_text("CACHE,KEY=VALUE, such as local,size=1048576"),
        "CACHE,KEY=VALUE",
        "one cache for all models. local,size=BYTES; or redis,host=NAME redis,port=N and more (user, db, ttl, "
        "tls_enabled ...), shared by servers. May be given several times",
        secret=True,
        is_many=True,
        separator=";",
    )
    byte_size: int | None = option(
        "--response-cache-byte-size", None, size(0), "SIZE", "older form of --cache-config local,size=SIZE"
    )
    redis_user: str | None = option(
        "--cache-redis-username",
        None,
        printable_text("a user's name"),
        "NAME",
        "the user of redis where --cache-config names none",
        variable="TRITONCACHE_REDIS_USERNAME",
    )
    redis_password: str | None = option(
        "--cache-redis-password",
        None,
        printable_text("a password"),
        "PASSWORD",
        "the password of redis where --cache-config names none. Better set TRITONCACHE_REDIS_PASSWORD",
        secret=True,
        variable="TRITONCACHE_REDIS_PASSWORD",
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        self.parsed()

    def parsed(self) -> "CacheSettings | None":
        """Return the shared cache's settings; None for a cache in each model's memory. Raises OptionError."""
        from sluice.serving.caching.settings import PASSWORD_VARIABLE, USER_VARIABLE, parse_cache_settings

        credentials = {USER_VARIABLE: self.redis_user, PASSWORD_VARIABLE: self.redis_password}
        known = {name: value for name, value in credentials.items() if value is not None}
        try:
            return parse_cache_settings(self.settings, self.byte_size, known)
        except SluiceError as error:
            raise OptionError(error.message) from None
