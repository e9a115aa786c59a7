"""Whether a grammar lets a value be written, in some order of its members."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from sluice.engine.guidance.matching import CompiledGrammar
from tests.engine.guidance.walks import TOKENIZER

_MAX_ORDERS = 720


def can_write(compiled: CompiledGrammar, value: Any) -> bool:
    return any(_accepts(compiled, each) for each in itertools.islice(_orders(value), _MAX_ORDERS))


def _orders(value: Any) -> Iterator[Any]:
    """Yield a value with its members in every order: a grammar has them in that of the schema."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(_orders(each)) for each in value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for each in itertools.product(*(list(_orders(value[name])) for name in names)):
                yield dict(zip(names, each, strict=True))
    else:
        yield value


def _accepts(compiled: CompiledGrammar, value: Any) -> bool:
    matcher = compiled._matcher.deep_copy()
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return bool(matcher.consume_tokens(ids)) and bool(matcher.is_accepting())
