"""Tokens of another issuer: which are taken, what their claims give, and how the issuer's keys are followed."""

import json
from time import time
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.access.control import AccessControl, Credentials
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.access.tokens import IssuerTokens, TokenSettings

ISSUER = "https://login.test/realm"
JWKS = "https://login.test/keys"
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
OTHER = rsa.generate_private_key(65537, 2048)
CLAIMS = {"tenant": "org", "models": "access.models", "groups": "roles", "name": "email"}


def jwk(key: Any, key_id: str, **more: str) -> dict[str, Any]:
    algorithms = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256", ed25519.Ed25519PrivateKey: "EdDSA"}
    name = next(name for kind, name in algorithms.items() if isinstance(key, kind))
    text = jwt.get_algorithm_by_name(name).to_jwk(key.public_key())
    return {**json.loads(text), "kid": key_id, **more}


class Issuer:
    """Answers as an issuer, and counts how often it is asked."""

    def __init__(self) -> None:
        self.keys = [jwk(RSA, "rsa"), jwk(EC, "ec"), jwk(ED, "ed"), {"kty": "oct", "k": "c2VjcmV0", "kid": "oct"}]
        self.document = {"issuer": ISSUER, "jwks_uri": JWKS}
        self.status = 200
        self.num_asked = 0
        self.now_s = 0.0
        self.tokens = self.make()

    def make(self, **settings: Any) -> IssuerTokens:
        chosen = TokenSettings(ISSUER, "sluice", **settings)
        return IssuerTokens(chosen, httpx.MockTransport(self.answer), lambda: self.now_s)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.num_asked += 1
        if str(request.url) == JWKS:
            return httpx.Response(self.status, json={"keys": self.keys})
        assert str(request.url) == f"{ISSUER}/.well-known/openid-configuration"
        return httpx.Response(self.status, json=self.document)


def token(key: Any = RSA, key_id: str | None = "rsa", algorithm: str | None = "RS256", **claims: Any) -> bytes:
    base = {"iss": ISSUER, "aud": "sluice", "sub": "me", "exp": time() + 86_400}
    payload = {name: value for name, value in (base | claims).items() if value is not None}
    return jwt.encode(payload, key, algorithm, headers=None if key_id is None else {"kid": key_id}).encode()


@pytest.mark.parametrize(
    ("key", "key_id", "algorithm"),
    [(RSA, "rsa", "RS256"), (RSA, "rsa", "PS512"), (EC, "ec", "ES256"), (ED, "ed", "EdDSA")],
    ids=["rs", "ps", "es", "ed"],
)
async def test_tokens_of_the_issuer_are_taken(key: Any, key_id: str, algorithm: str) -> None:
    issuer, sent = Issuer(), token(key, key_id, algorithm)
    assert issuer.tokens.find(sent) is None
    found = await issuer.tokens.verify(sent)
    assert (found.key_id, found.name, found.tenant, found.models) == ("jwt:me", "me", "", ("*",))
    assert found.groups == {RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG}
    assert issuer.tokens.find(sent) is found
    issuer.now_s += 61
    assert issuer.tokens.find(sent) is None


HMAC = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (token(exp=time() - 60), "has expired"),
        (token(exp=None), "lacks the claim 'exp'"),
        (token(sub=None), "lacks the claim 'sub'"),
        (token(aud="other"), "is not for the audience 'sluice'"),
        (token(aud=None), "lacks the claim 'aud'"),
        (token(iss="https://evil.test"), f"is not of the issuer '{ISSUER}'"),
        (token(nbf=time() + 86_400), "is not valid"),
        (token(OTHER), "is not valid"),
        (token(EC, "rsa", "ES256"), "is not valid"),
        (token(OTHER, "other"), "is signed by a key that its issuer does not have"),
        (token(key_id=None), "is signed by a key that its issuer does not have"),
        (token(HMAC, "oct", "HS256"), "is signed by 'HS256'"),
        (token(HMAC, "rsa", "HS256"), "is signed by 'HS256'"),
        (token(None, "rsa", "none"), "is signed by 'none'"),
        (token(sub="a\nb"), "has a claim 'sub'"),
        (b"a.b.c", "is not valid"),
        (b"..", "is not valid"),
        (b"\xff.\xff.\xff", "is not valid"),
    ],
    ids=range(18),
)
async def test_other_tokens_are_refused(sent: bytes, said: str) -> None:
    with pytest.raises(SluiceError) as refused:
        await Issuer().tokens.verify(sent)
    assert refused.value.code is ErrorCode.UNAUTHENTICATED
    assert refused.value.message.startswith(f"the token {said}")


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        (
            {"org": "acme", "email": "me@acme", "access": {"models": ["a*", "b"]}, "roles": "admin inference guests"},
            ("me@acme", "acme", ("a*", "b"), {RouteGroup.ADMIN, RouteGroup.INFERENCE}),
        ),
        ({}, ("me", "", (), set())),
        ({"access": {"models": "a b,c"}, "roles": 5, "org": None}, ("me", "", ("a", "b", "c"), set())),
    ],
)
async def test_claims_give_rights_and_missing_ones_none(claims: dict[str, Any], expected: Any) -> None:
    found = await Issuer().make(claims=CLAIMS).verify(token(**claims))
    assert (found.name, found.tenant, found.models, found.groups) == expected


async def test_the_issuer_s_keys_are_followed_within_bounds() -> None:
    issuer = Issuer()
    await issuer.tokens.verify(token())
    issuer.keys = [jwk(OTHER, "new")]
    for _ in range(5):
        with pytest.raises(SluiceError, match="does not have"):
            await issuer.tokens.verify(token(OTHER, "new"))
    assert issuer.num_asked == 2
    issuer.now_s += 31
    await issuer.tokens.verify(token(OTHER, "new"))
    await issuer.tokens.verify(token(OTHER, None, aud=["x", "sluice"]))
    with pytest.raises(SluiceError, match="does not have"):
        await issuer.tokens.verify(token())
    assert issuer.num_asked == 4
    issuer.status = 500
    issuer.now_s += 4000
    await issuer.tokens.verify(token(OTHER, "new"))
    assert issuer.num_asked == 5


@pytest.mark.parametrize("broken", [{"issuer": "https://evil.test", "jwks_uri": JWKS}, {"issuer": ISSUER}, []])
async def test_an_issuer_that_cannot_be_read(broken: Any) -> None:
    issuer = Issuer()
    issuer.document = broken
    with pytest.raises(SluiceError) as refused:
        await issuer.tokens.verify(token())
    assert refused.value.code is ErrorCode.UNAVAILABLE
    found = await issuer.make(jwks_url=JWKS).verify(token())
    assert isinstance(found, Identity)


async def test_a_token_stands_for_a_key() -> None:
    access = AccessControl(KeyRing(None), verifier=Issuer().make(claims={"tenant": "org"}))
    assert access.is_enforced
    sent = Credentials(b"Bearer " + token(org="acme"), "192.0.2.1")
    for _ in range(2):
        sender = await access.identify(sent, RouteGroup.INFERENCE)
        assert (sender.tenant, access.resume(sender.identity, RouteGroup.INFERENCE)) == ("acme", sender.identity)
    with pytest.raises(SluiceError, match="no access to the routes of admin; it has: embeddings, inference, rag"):
        await access.identify(sent, RouteGroup.ADMIN)
    wrong = Credentials(b"Bearer " + token(OTHER), "192.0.2.1")
    codes = []
    for _ in range(12):
        with pytest.raises(SluiceError) as refused:
            await access.identify(wrong, None)
        codes.append(refused.value.code)
    assert codes == [ErrorCode.UNAUTHENTICATED] * 10 + [ErrorCode.OVERLOADED] * 2
    assert (await access.identify(sent, None)).tenant == "acme", "known from before"
    await access.close()
