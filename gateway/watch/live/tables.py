"""The lists of a sample: models, open generations, tenants and keys."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from sluice.engine.frames import TenantTokens
from sluice.errors import SluiceError
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.plane.live_requests import RUNNING, LiveRequest
from sluice.gateway.tenancy.quotas.account import MICROS, Account
from sluice.gateway.tenancy.quotas.observer import account_levels
from sluice.gateway.tenancy.quotas.store import QuotaStore
from sluice.gateway.watch.live.sample import (
    KeyPart,
    ModelPart,
    QuotaPart,
    SequencesPart,
    TenantPart,
    VersionPart,
)
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import Model
from sluice.serving.repository.managed_model import IndexEntry, ModelState
from sluice.serving.repository.repository import ModelRepository

MAX_SEQUENCES = 200
MAX_TENANTS = MAX_KEYS = 100
_STATES = (ModelState.READY, ModelState.LOADING, ModelState.UNLOADING, ModelState.UNAVAILABLE)
"""States of a version, the best first."""


def describe_models(repository: ModelRepository) -> list[ModelPart]:
    """Describe the models of the repository by name, with their versions."""
    serving = {(each.name, each.version): each for each in repository.models()}
    by_name: dict[str, list[IndexEntry]] = {}
    for entry in repository.index():
        by_name.setdefault(entry.name, []).append(entry)
    return [_describe_model(repository, name, rows, serving) for name, rows in by_name.items()]


def _describe_model(
    repository: ModelRepository, name: str, rows: Sequence[IndexEntry], serving: Mapping[tuple[str, int], Model]
) -> ModelPart:
    shares: Mapping[int, float] = {}
    with suppress(SluiceError):
        routing = repository.routing(name)
        shares = {} if routing.weights is None else routing.shares
    states = {row.state for row in rows}
    models = [serving.get((name, row.version)) for row in rows]
    versions = [
        VersionPart(
            version=str(row.version),
            state=row.state.value,
            reason=hide_paths(row.reason),
            weight=shares.get(row.version, 0.0) if shares else None,
            in_flight=0 if model is None else _num_in_flight(model),
        )
        for row, model in zip(rows, models, strict=True)
        if row.state is not None
    ]
    state = next((each.value for each in _STATES if each in states), "")
    return ModelPart(name, state, any(isinstance(each, LlmModel) for each in models), versions)


def _num_in_flight(model: Model) -> int:
    texts = model.text.activity.texts.count if isinstance(model, LlmModel) else 0
    return max(model.num_in_flight, texts)  # a text of the v2 protocol counts as both


def list_sequences(requests: Sequence[LiveRequest]) -> SequencesPart:
    """Choose the open generations to show: those that run come first, and of both kinds the oldest."""
    running = [each for each in requests if each.state == RUNNING][:MAX_SEQUENCES]
    waiting = [each for each in requests if each.state != RUNNING]
    return SequencesPart(len(requests), [*running, *waiting[: MAX_SEQUENCES - len(running)]])


def describe_tenants(
    requests: Iterable[LiveRequest],
    tokens: Mapping[str, TenantTokens],
    quotas: Mapping[str, list[QuotaPart]],
    elapsed_s: float,
) -> list[TenantPart]:
    """Describe the tenants with open requests, tokens or used limits; those with the most tokens first."""
    states = Counter((each.tenant, each.state == RUNNING) for each in requests)
    names = {*(tenant for tenant, _ in states), *tokens, *quotas}

    def describe(name: str) -> TenantPart:
        used = tokens.get(name, TenantTokens())
        return TenantPart(
            name=name,
            running=states[name, True],
            waiting=states[name, False],
            prompt_tokens_per_s=round(used.prompt / elapsed_s, 3),
            generated_tokens_per_s=round(used.generated / elapsed_s, 3),
            quotas=quotas.get(name, []),
        )

    found = sorted(map(describe, names), key=lambda each: (-each.generated_tokens_per_s, each.name))
    return found[:MAX_TENANTS]


def describe_keys(quotas: Mapping[str, list[QuotaPart]]) -> list[KeyPart]:
    """Describe the keys with limits that were used, by name."""
    return [KeyPart(name, parts) for name, parts in sorted(quotas.items())][:MAX_KEYS]


def read_quotas(store: QuotaStore | None, scope: str) -> dict[str, list[QuotaPart]]:
    """Return the usage of the limits of a scope's parties (`key`, `tenant`), by name."""
    accounts = () if store is None else store.accounts()
    return {each.party.name: _quotas(each) for each in accounts if each.party.scope == scope}


def _quotas(account: Account) -> list[QuotaPart]:
    parts = []
    for limit, level in account_levels(account).items():
        unit = MICROS if limit.startswith("money") else 1
        used = (level.most - level.left) / unit
        ratio = round(1 - level.left / level.most, 6) if level.most else 1.0
        parts.append(QuotaPart(limit, used, level.most / unit, ratio))
    return parts
