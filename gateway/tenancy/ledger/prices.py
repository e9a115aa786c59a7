"""The price table: what tokens of a model cost. The ledger's rows have prices, and quotas of money count by them."""

from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import msgspec
import yaml

from sluice.engine.yaml_text import load_yaml

_MAX_CACHED = 1024
PRICES_FLAG = "--price-table"


class ModelPrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of a million tokens, in units of money. A cached prompt token costs what others do where none is named."""

    prompt: float = 0.0
    generated: float = 0.0
    cached: float | None = None

    def price(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> int:
        """Return the price in millionths of the unit."""
        cached = self.prompt if self.cached is None else self.cached
        return round(
            (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * cached + generated_tokens * self.generated
        )


FREE = ModelPrices()


class PriceTable:
    """Prices by model. The first glob that fits counts, of `model:adapter` and of `model`; what fits none is free."""

    def __init__(self, prices: dict[str, ModelPrices] | None = None) -> None:
        self._prices = prices or {}
        self.find = lru_cache(_MAX_CACHED)(self._find)
        """Returns the prices of a model and its adapter."""

    def price(self, model: str, adapter: str, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> int:
        """Return the price of tokens in millionths of the unit. The cached tokens are some of the prompt's."""
        return self.find(model, adapter).price(prompt_tokens, cached_tokens, generated_tokens)

    def _find(self, model: str, adapter: str = "") -> ModelPrices:
        names = (f"{model}:{adapter}", model) if adapter else (model,)
        matching = (prices for glob, prices in self._prices.items() if any(fnmatchcase(each, glob) for each in names))
        return next(matching, FREE)


def read_prices(path: str) -> PriceTable:
    """Read a table of JSON or YAML: prices by glob. Raises ValueError, which names the file and the field."""
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
        prices = msgspec.convert(content, dict[str, ModelPrices])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{PRICES_FLAG} {path} cannot be used: {reason}") from None
    for glob, each in prices.items():
        for name in each.__struct_fields__:
            value = getattr(each, name)
            if value is not None and not 0 <= value < 1e9:
                raise ValueError(f"{PRICES_FLAG} {path}: {glob}.{name} must be at least 0 and finite, got {value}")
    return PriceTable(prices)
