"""Tokens of another issuer (OpenID Connect, JWT): checked against the issuer's public keys, and read as identities."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic, time
from typing import Any

import httpx
import jwt
import msgspec

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.access.identity import ANY, NEW_KEY_GROUPS, Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import MAX_NAME_CHARS

log = logging.getLogger(__name__)

_UNREADABLE = (
    *(httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError),
    *(ValueError, AttributeError, TypeError),
)
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Signatures by a key pair alone: with HS256 whoever can check a token can forge it."""
_LEEWAY_S = 30.0
_TIMEOUT_S = 5.0
_MAX_BYTES = 1 << 20
_MAX_AGE_S = 3600.0
_MIN_AGE_S = 30.0
"""The issuer's keys are read again after an hour, and for an unknown key at most this often."""
_MAX_TOKENS = 4096
_TOKEN_KEPT_S = 60.0
"""How long a token that was checked is not checked again: a key that the issuer withdraws ends within this time."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """The issuer whose tokens count, and their audience.

    `claims` are names of claims by the field of `Identity`, with dots between the names of nested ones. `jwks_url`
    None: the issuer's discovery document says it.
    """

    issuer: str
    audience: str
    jwks_url: str | None = None
    claims: Mapping[str, str] = field(default_factory=dict)


class IssuerTokens:
    """Verifies tokens of one issuer. Belongs to the event loop."""

    def __init__(
        self,
        settings: TokenSettings,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`transport` takes the place of the network."""
        self._settings = settings
        self._clock = clock
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, transport=transport)
        self._keys: list[jwt.PyJWK] = []
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._tokens: dict[bytes, tuple[Identity, float]] = {}

    def find(self, token: bytes) -> Identity | None:
        """Return the identity of a token that was verified a moment ago."""
        found = self._tokens.get(sha256(token).digest())
        return found[0] if found is not None and self._clock() < found[1] else None

    async def verify(self, token: bytes) -> Identity:
        """Return the identity behind a token. Raises UNAUTHENTICATED, and UNAVAILABLE while the issuer's keys are not
        known."""
        text = token.decode("ascii", "replace")
        identity = self._read(await self._decode(text))
        if len(self._tokens) >= _MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        lasts_s = min(_TOKEN_KEPT_S, (identity.expires_at or 0) + _LEEWAY_S - time())
        self._tokens[sha256(token).digest()] = identity, self._clock() + lasts_s
        return identity

    async def _decode(self, text: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(text)
            algorithm = header.get("alg")
            if algorithm not in ALGORITHMS:
                raise _refusal(f"is signed by {str(algorithm)[:20]!r}; allowed: {', '.join(ALGORITHMS)}")
            key = await self._find_key(header.get("kid"))
            claims: dict[str, Any] = jwt.decode(
                text,
                key.key,
                algorithms=[algorithm],
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError:
            raise _refusal("has expired") from None
        except jwt.InvalidAudienceError:
            raise _refusal(f"is not for the audience {self._settings.audience!r}") from None
        except jwt.InvalidIssuerError:
            raise _refusal(f"is not of the issuer {self._settings.issuer!r}") from None
        except jwt.MissingRequiredClaimError as error:
            raise _refusal(f"lacks the claim {error.claim!r}") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise _refusal("is not valid") from None
        return claims

    async def _find_key(self, key_id: object) -> jwt.PyJWK:
        found = self._choose(key_id)
        if self._is_due(found):
            async with self._reading:  # one request reads for all that wait
                if self._is_due(self._choose(key_id)):
                    self._read_at = self._clock()
                    await self._read_keys()
            found = self._choose(key_id)
        if found is None:
            if not self._keys:
                message = "the token issuer's keys cannot be read now"
                raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=_MIN_AGE_S)
            raise _refusal("is signed by a key that its issuer does not have")
        return found

    def _is_due(self, found: jwt.PyJWK | None) -> bool:
        """Whether the issuer's keys are to be read again."""
        return self._read_at is None or self._clock() - self._read_at > (_MIN_AGE_S if found is None else _MAX_AGE_S)

    def _choose(self, key_id: object) -> jwt.PyJWK | None:
        if key_id is None:
            return self._keys[0] if len(self._keys) == 1 else None
        return next((each for each in self._keys if each.key_id == key_id), None)

    async def _read_keys(self) -> None:
        """Read the issuer's keys. Those known stay where that fails."""
        try:
            url = self._settings.jwks_url or await self._discover()
            entries = (await self._get(url)).get("keys", [])
            keys = [key for each in entries if (key := _parse_key(each)) is not None]
            if not keys:
                raise ValueError(f"{url} has no key for signatures")
            self._keys = keys
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            msgspec.MsgspecError,
            ValueError,
            AttributeError,
            TypeError,
        ) as error:
            log.warning("the keys of %s cannot be read: %s", self._settings.issuer, error)

    async def _discover(self) -> str:
        url = f"{self._settings.issuer.rstrip('/')}/.well-known/openid-configuration"
        document = await self._get(url)
        if document.get("issuer") != self._settings.issuer or not isinstance(document.get("jwks_uri"), str):
            raise ValueError(f"{url} is not the discovery document of {self._settings.issuer}")
        found: str = document["jwks_uri"]
        return found

    async def _get(self, url: str) -> dict[str, Any]:
        body = bytearray()
        async with self._client.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"{url} answered {response.status_code}")
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"{url} is longer than {_MAX_BYTES} bytes")
        return msgspec.json.decode(body, type=dict[str, Any])

    def _read(self, claims: dict[str, Any]) -> Identity:
        """Return the identity that the claims of a valid token say. A field whose claim is missing gets nothing."""
        mapped = self._settings.claims
        found = {name: _find_claim(claims, path) for name, path in mapped.items()}
        subject = _text(claims["sub"], "sub")
        groups = NEW_KEY_GROUPS
        if "groups" in mapped:
            groups = frozenset(map(RouteGroup, set(RouteGroup) & set(_words(found["groups"]))))
        return Identity(
            key_id=f"jwt:{subject}",
            name=_text(found.get("name") or subject, mapped.get("name", "sub")),
            tenant=_text(found.get("tenant") or "", mapped.get("tenant", "")),
            models=_words(found["models"]) if "models" in mapped else ANY,
            adapters=_words(found["adapters"]) if "adapters" in mapped else ANY,
            groups=groups,
            expires_at=float(claims["exp"]) + _LEEWAY_S,
            is_foreign=True,
        )

    async def close(self) -> None:
        await self._client.aclose()


def _parse_key(entry: dict[str, Any]) -> jwt.PyJWK | None:
    """Return a key for signatures; None for another, such as one that this PyJWT does not know."""
    if entry.get("use", "sig") != "sig" or entry.get("kty") == "oct":
        return None
    try:
        return jwt.PyJWK(entry)
    except jwt.PyJWTError:
        return None


def _find_claim(claims: dict[str, Any], path: str) -> Any:
    if path in claims:  # names such as https://example.com/tenant have dots
        return claims[path]
    found: Any = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _words(value: object) -> tuple[str, ...]:
    """Return the words of a claim, which is a list of them or a text with blanks or commas between."""
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def _text(value: object, claim: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not value.isprintable():
        raise _refusal(f"has a claim {claim!r} that is not a printable text of at most {MAX_NAME_CHARS} characters")
    return value


def _refusal(problem: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAUTHENTICATED, f"the token {problem}")
