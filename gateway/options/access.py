"""Options of access: who may send requests."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sluice.gateway.options.option import OptionError, option, printable_text, truth
from sluice.gateway.options.responses import NONE, parse_store_place

_MOST_KEY_BYTES = 4096
_CLAIM_FIELDS = ("name", "tenant", "models", "adapters", "groups")


def network(text: str) -> str:
    """Parse a network, such as 10.0.0.0/8; its value is the text."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError("an address or a network, such as 10.0.0.0/8 or fd00::/8") from None
    return text


def origin(text: str) -> str:
    """Parse an origin of web pages, or *."""
    parts = urlsplit(text)
    if text != "*" and (
        parts.scheme not in ("http", "https") or not parts.netloc or text != f"{parts.scheme}://{parts.netloc}"
    ):
        raise ValueError("an origin such as https://app.example.com, or *")
    return text


def host_name(text: str) -> str:
    """Parse a name of this server, or a glob of names."""
    if not re.fullmatch(r"[\w*.-]+", text, re.ASCII):
        raise ValueError("a name without a port, such as llm.example.com, *.example.com or *")
    return text


def issuer_url(text: str) -> str:
    """Parse the URL of an issuer of tokens."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or not text.isprintable():
        raise ValueError("a URL such as https://login.example.com/realm")
    return text


def claim_names(text: str) -> dict[str, str]:
    """Parse the names of claims by field: tenant=org,groups=realm.roles."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, claim = (each.strip() for each in part.partition("="))
        if name not in _CLAIM_FIELDS or not claim or name in found:
            raise ValueError(f"FIELD=CLAIM,..., where fields are of {', '.join(_CLAIM_FIELDS)}")
        found[name] = claim
    return found


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Access: who may send requests"""

    api_key: str | None = option(
        "--api-key",
        None,
        printable_text("printable text that is not empty"),
        "KEY",
        "one key with all rights: clients must send `Authorization: Bearer KEY`, for everything but health. Better "
        "--api-key-file or SLUICE_API_KEY: every user of the machine can read a command line. `sluice keys` makes keys "
        "with rights of their own",
        secret=True,
    )
    api_key_file: str | None = option(
        "--api-key-file", None, printable_text("the path of a file"), "PATH", "file whose first line is that key"
    )
    keys_store: str | None = option(
        "--keys-store",
        None,
        parse_store_place,
        "PATH|URL|none",
        "store of the keys of `sluice keys`: a SQLite file, or a Redis that gateways share; none takes none of them. "
        "Where this names a store, and once the default one has held a key, all requests but health need one. "
        "Default: keys.sqlite in --state-path",
        secret=True,
    )
    requires_keys: bool = option(
        "--require-keys",
        False,
        truth,
        None,
        "require a key even while there is none, whatever the state of the store: every request is refused before "
        "`sluice keys create`",
    )
    trusted_proxies: tuple[str, ...] = option(
        "--trusted-proxies",
        (),
        network,
        "NETWORK",
        "proxies before this server: their x-forwarded-for has the client's address, and their x-sluice-tenant the "
        "tenant. May be given several times",
        is_many=True,
    )
    jwt_issuer: str | None = option(
        "--jwt-issuer",
        None,
        issuer_url,
        "URL",
        "take tokens (JWT) of this OpenID Connect issuer in the place of keys. Needs sluice[jwt]",
    )
    jwt_audience: str | None = option(
        "--jwt-audience", None, printable_text("a printable text"), "NAME", "required audience (aud) of these tokens"
    )
    jwt_jwks_url: str | None = option(
        "--jwt-jwks-url",
        None,
        issuer_url,
        "URL",
        "URL of the issuer's keys. Default: that of its discovery document",
    )
    jwt_claims: dict[str, str] | None = option(
        "--jwt-claims",
        None,
        claim_names,
        "FIELD=CLAIM,...",
        "claims of a token with its name, tenant, models, adapters and groups, such as tenant=org,groups=roles. "
        "Default: name=sub; all models, and the groups inference, embeddings and rag",
    )
    cors_origins: tuple[str, ...] = option(
        "--cors-allow-origins",
        (),
        origin,
        "ORIGIN",
        "pages of this origin may call the API from a browser; * for all. May be given several times. Default: none",
        is_many=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        "--allowed-hosts",
        (),
        host_name,
        "NAME",
        "a name of this server in the header Host, such as llm.example.com, *.example.com or *, while no key is "
        "required. May be given several times; then requests from everywhere are held to these, else only those of "
        "this machine. Addresses, localhost, *.internal, *.svc and names without a dot are its names anyway",
        is_many=True,
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        if self.api_key is not None and self.api_key_file is not None:
            raise OptionError("--api-key and --api-key-file are two places of one key; give one of them")
        if (self.jwt_issuer is None) != (self.jwt_audience is None):
            raise OptionError("--jwt-issuer and --jwt-audience belong together; give both")
        if self.jwt_issuer is None and (self.jwt_jwks_url or self.jwt_claims):
            raise OptionError("--jwt-jwks-url and --jwt-claims need --jwt-issuer")
        has_other = self.api_key is not None or self.api_key_file is not None or self.jwt_issuer is not None
        if self.requires_keys and self.keys_store == NONE and not has_other:
            raise OptionError("--require-keys with --keys-store none lets nobody in; give --api-key-file or a store")

    @property
    def are_keys_required(self) -> bool:
        """Whether requests need a key even while the store has none: a store that is named is there for them."""
        return self.requires_keys or self.keys_store not in (None, NONE)

    def server_key(self) -> str | None:
        """Return the one key with all rights; None where there is none. Raises OptionError for an unusable file."""
        if self.api_key_file is None:
            return self.api_key
        try:
            with Path(self.api_key_file).open(encoding="utf-8") as file:
                key = file.readline(_MOST_KEY_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--api-key-file cannot be read: {error}") from None
        if not key or not key.isprintable():
            raise OptionError("--api-key-file must have a key of printable characters on its first line")
        return key

    def store_place(self, state_folder: Path) -> str | None:
        """Return the file or URL of the keys; None where there are none."""
        if self.keys_store is None:
            return str(state_folder / "keys.sqlite")
        return None if self.keys_store == NONE else self.keys_store
