"""A client's grammar in Lark, which vLLM's backend `guidance` hands to llguidance as it is. It is the grammar that our
own executor gives to llguidance, so that outputs are the same."""

import json
from collections.abc import Mapping
from typing import Any

from sluice.engine.guidance.translate import translate
from sluice.engine.types import Grammar

_NESTED = "answer_of_client"
"""The rule that stands for the second grammar."""


def lark_of(grammar: Grammar) -> str:
    """Return one Lark grammar. Raises INVALID for what is wrong with the text."""
    first, *others = json.loads(translate(grammar).text)["grammars"]
    if not others:
        text: str | None = first.get("lark_grammar")
        return text if text is not None else f"start: {_directive(first)}\n"
    # What comes before the answer refers to it by its name as a grammar; here it is a rule.
    [answer] = others
    return f"{first['lark_grammar'].replace('@answer', _NESTED)}\n{_NESTED}: {_directive(answer)}\n"


def _directive(grammar: Mapping[str, Any]) -> str:
    if grammar.get("json_schema") is not None:
        return f"%json {json.dumps(grammar['json_schema'])}"
    return f"%lark {{\n{grammar['lark_grammar']}\n}}"
