"""Tells whether one text can match two patterns of members' names."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

_PREFIX = re.compile(r"\^((?:[A-Za-z0-9_ ]|\\[^A-Za-z0-9])+)(?![*?{|])")
_MAX_COMPARED = 64
"""Most patterns that are compared in full. More are left to the compiler."""


def are_disjoint(patterns: Sequence[str]) -> bool:
    """Whether no text matches two of the patterns, as far as their beginnings or the compiler can tell."""
    if len(patterns) < 2 or len(patterns) > _MAX_COMPARED:
        return True
    prefixes = [match[1] if "|" not in each and (match := _PREFIX.match(each)) else "" for each in patterns]
    if all(prefixes) and not any(a.startswith(b) or b.startswith(a) for a, b in combinations(prefixes, 2)):
        return True
    return "disjoint" not in compile_error(json.dumps({"patternProperties": dict.fromkeys(patterns, True)}))


@lru_cache(256)
def compile_error(schema: str) -> str:
    """Return what the compiler finds wrong with a small schema; "" for nothing."""
    from llguidance import LLMatcher  # 40 ms that only these schemas need

    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
