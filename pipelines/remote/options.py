"""Options of a remote model: the `parameters` of its config.pbtxt, and the files of secrets that they name."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_origin
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid

DEFAULT_TIMEOUT_S = 600.0
_GENERATIONS, _EMBEDDINGS = 64, 8
"""Default limits of concurrent requests."""
_KEY_ADVICE = "put the key into a file that only the server reads, and name it in api_key_file"
_SECRETS = ("auth", "cookie", "credential", "key", "password", "secret", "token")
"""Words in the names of headers whose values are secret."""
_OWN_FIELDS = frozenset({"model", "messages", "prompt", "input", "stream", "stream_options", "encoding_format", "n"})
"""Fields of the body that `extra_body` must not set: this backend fills them in, or its reading of answers depends on
them."""

Positive = Annotated[float, Meta(gt=0.0)]
Count = Annotated[int, Meta(ge=1)]


class Endpoint(StrEnum):
    """The kind of request sent to the API. The value is its name in config.pbtxt."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"

    @property
    def path(self) -> str:
        """The path below the base URL."""
        return "/chat/completions" if self is Endpoint.CHAT else f"/{self.value}"


class ApiDialect(StrEnum):
    """The set of fields that the API takes beyond the common ones."""

    OPENAI = "openai"
    VLLM = "vllm"


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One API and the model there. Fields have the names of the parameters; times are in seconds.

    `timeout_s` limits a whole request with its retries; None leaves it to the server's limit. `context_tokens` is the
    most that a prompt and its answer have together, for those who assemble prompts; 0 is unknown. `dimensions` is the
    requested length of vectors. `ca_file` holds certificates to trust in place of the usual ones. `headers_file` holds
    headers as a JSON object, which the configuration does not show. Without `include_usage` streams have no counts.
    """

    base_url: str
    model: str
    endpoint: Endpoint = Endpoint.CHAT
    dialect: ApiDialect = ApiDialect.OPENAI
    api_key_file: str = ""
    organization: str = ""
    project: str = ""
    timeout_s: Positive | None = None
    connect_timeout_s: Positive = 5.0
    max_retries: Annotated[int, Meta(ge=0, le=100)] = 2
    max_concurrency: Count | None = None
    max_queue_size: Annotated[int, Meta(ge=0)] = 1024
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    dimensions: Annotated[int, Meta(ge=0)] = 0
    max_tokens_field: str = ""
    ca_file: str = ""
    check_on_load: bool = False
    include_usage: bool = True
    extra_body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    headers_file: str = ""

    @property
    def host(self) -> str:
        """The API's host for messages, with the port that the URL has."""
        return urlsplit(self.base_url).netloc

    @property
    def concurrency(self) -> int:
        """Most concurrent requests to the API. Embeddings have fewer, as waiting requests form batches."""
        return self.max_concurrency or (_EMBEDDINGS if self.endpoint is Endpoint.EMBEDDINGS else _GENERATIONS)

    @property
    def length_field(self) -> str:
        """The API's name of max_tokens. OpenAI's newer models know only the newer name, other APIs often do not."""
        if self.max_tokens_field:
            return self.max_tokens_field
        is_newer = self.endpoint is Endpoint.CHAT and self.dialect is ApiDialect.OPENAI
        return "max_completion_tokens" if is_newer else "max_tokens"


_FIELDS = {each.name: each for each in msgspec.structs.fields(RemoteOptions)}


def parse_options(config: ModelConfig) -> RemoteOptions:
    """Parse a model's parameters. Raises SluiceError INVALID for missing ones, bad values and a key in plain text."""
    given = {key: each.string_value.strip() for key, each in config.parameters.items()}
    if "api_key" in given:
        # Clients that may read the model's configuration would see the key.
        raise _refusal(config.name, "api_key", f"parameter 'api_key' is not taken: {_KEY_ADVICE}")
    values = {key: _parse_value(config.name, key, text) for key, text in given.items() if key in _FIELDS and text}
    if "base_url" not in values:
        example = "https://api.openai.com/v1"
        raise _refusal(config.name, "base_url", f"parameter 'base_url' is missing: where the API is, as in {example}")
    options = RemoteOptions(**({"model": config.name} | values))
    _check_url(config.name, options.base_url)
    _check_headers(config.name, options)
    _check_extra_body(config.name, options)
    return options


def read_key(options: RemoteOptions, folder: Path) -> str:
    """Read the API's key, "" where no file is named. A relative path starts from the model's `folder`.

    Raises SluiceError INVALID where the file cannot be read or holds no key. Blocks: call it on a thread.
    """
    if not options.api_key_file:
        return ""
    key = _read_text("api_key_file", folder / options.api_key_file).strip()
    if not key or not _fits_header(key):
        raise invalid("api_key_file", "api_key_file must hold one key: a line of ASCII characters")
    return key


def read_headers(options: RemoteOptions, folder: Path) -> dict[str, str]:
    """Return the configured headers, over which those of `headers_file` win. Raises and blocks as `read_key`."""
    if not options.headers_file:
        return options.headers
    text = _read_text("headers_file", folder / options.headers_file)
    try:
        headers = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError:
        raise invalid("headers_file", "headers_file must hold a JSON object of strings") from None
    if not all(name and _fits_header(name + value) for name, value in headers.items()):
        raise invalid("headers_file", "headers_file has a name or a value that no header can have")
    return options.headers | headers


def _read_text(key: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise invalid(key, f"{key} {path} cannot be read: {reason}") from None


def _fits_header(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _parse_value(model: str, key: str, text: str) -> Any:
    field = _FIELDS[key]
    try:
        if get_origin(field.type) is dict:
            return msgspec.json.decode(text, type=field.type)
        return msgspec.convert(text, field.type, strict=False)
    except msgspec.MsgspecError as error:
        shown = text if get_origin(field.type) is not dict else f"{text[:20]}…"  # headers may be secret
        message = f"parameter '{key}' is '{shown}': {_expected(field.type) or error}"
        raise _refusal(model, key, message) from None


def _expected(kind: Any) -> str:
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    return f"expected one of {', '.join(kind)}" if is_enum else ""


def _check_url(model: str, url: str) -> None:
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refusal(model, "base_url", f"parameter 'base_url' is '{url}', expected http:// or https:// and a host")
    if parts.username is not None or parts.password is not None:
        raise _refusal(model, "base_url", f"parameter 'base_url' holds a user's name or password: {_KEY_ADVICE}")
    if parts.query or parts.fragment:
        raise _refusal(model, "base_url", "parameter 'base_url' must end with the path, as in http://host:8000/v1")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # reading it raises for what is not a number
    except ValueError:
        return None
    return parts


def _check_headers(model: str, options: RemoteOptions) -> None:
    for name, value in options.headers.items():
        if any(word in name.lower() for word in _SECRETS):
            advice = f"{_KEY_ADVICE}, or such headers into one that headers_file names"
            raise _refusal(model, "headers", f"parameter 'headers' has '{name}', which is not taken: {advice}")
        if not name or not _fits_header(name + value):
            raise _refusal(model, "headers", f"parameter 'headers' has '{name}', which no header can be")


def _check_extra_body(model: str, options: RemoteOptions) -> None:
    taken = sorted(_OWN_FIELDS & options.extra_body.keys())
    if taken:
        message = f"parameter 'extra_body' has '{taken[0]}', which the backend fills in itself"
        raise _refusal(model, "extra_body", message)


def _refusal(model: str, key: str, message: str) -> SluiceError:
    return invalid(key, f"unable to load model '{model}', {message}")
