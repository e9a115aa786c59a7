"""docs/openai-compatibility.md is true: a running server treats every field as the page says."""

from typing import Any

import pytest

from tests.gateway.front.http.live import LiveServer
from tests.tools.compatibility_tables import FieldRow, Treatment, rows

TURNS = [{"role": "user", "content": "hi"}]
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "rill", "messages": TURNS, **ONE_TOKEN},
    "/v1/completions": {"model": "rill", "prompt": "hi", **ONE_TOKEN},
    "/v1/responses": {"model": "rill", "input": "hi", "max_output_tokens": 1, "temperature": 0, "store": False},
    "/v1/messages": {"model": "rill", "messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "rill", "messages": TURNS},
    "/api/chat": {"model": "rill", "messages": TURNS, "options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"model": "rill", "prompt": "hi", "options": {"num_predict": 1}, "stream": False},
}
"""A request to each route of a language model. Those to encoders have tests of their own."""
VALUES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [5],
    "chat_template_kwargs": {"messages_": 1},
    "continue_final_message": True,
    "bad_words": ["x"],
    "cache_salt": "s",
    "echo": True,
    "early_stopping": True,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "client_metadata": {"x": "y"},
    "context_management": [{"type": "compaction", "compact_threshold": 1}],
    "max_completion_tokens": 1,
    "max_output_tokens": 1,
    "metadata": {},
    "diagnostics": {"previous_message_id": None},
    "prompt_cache_options": {"comparison_response_id": "resp_1"},
    "min_p": 0.5,
    "min_tokens": 1,
    "n": 2,
    "output_config": {},
    "presence_penalty": 0.5,
    "prediction": {"type": "content", "content": "x"},
    "priority": 1,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_logprobs": 1,
    "context": [5],
    "include": ["message.output_text.logprobs"],
    "include_stop_str_in_output": True,
    "instructions": "Be brief.",
    "keep_alive": "5m",
    "max_tool_calls": 1,
    "parallel_tool_calls": False,
    "raw": True,
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "text": {"format": {"type": "text"}},
    "top_logprobs": 1,
    "repetition_penalty": 1.5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "safety_identifier": "ada",
    "seed": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": "x",
    "store": True,
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "stream": True,
    "system": "Be brief.",
    "thinking": {"type": "disabled"},
    "tool_choice": {"type": "auto"},
    "top_k": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_p_reset_ids": 2,
    "typical_p": 0.5,
    "truncate_prompt_tokens": 1,
    "truncation": "auto",
    "user": "ada",
    "verbosity": "low",
    "cache_control": {"type": "ephemeral"},
    "service_tier": "auto",
    "betas": ["context-1m-2025-08-07"],
    "container": "c",
    "inference_geo": "us",
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "speed": "fast",
}
"""A value for each field that has an effect, or none, but is known."""
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "top_logprobs"): {"top_logprobs": 1, "logprobs": True},
    ("/v1/chat/completions", "stream_options"): {"stream_options": {"include_usage": True}, "stream": True},
    ("/v1/chat/completions", "tools"): {"tools": TOOLS},
    ("/v1/chat/completions", "tool_choice"): {"tools": TOOLS, "tool_choice": "required"},
    ("/v1/chat/completions", "functions"): {"functions": [FUNCTION]},
    ("/v1/chat/completions", "function_call"): {"functions": [FUNCTION], "function_call": {"name": "f"}},
    ("/v1/chat/completions", "include_reasoning"): {"include_reasoning": False},
    ("/v1/chat/completions", "thinking_token_budget"): {"thinking_token_budget": -1},
    ("/v1/completions", "logprobs"): {"logprobs": 1},
    ("/v1/completions", "stream_options"): {"stream_options": {"include_usage": True}, "stream": True},
    ("/v1/completions", "best_of"): {"best_of": 2},
    ("/v1/responses", "background"): {"background": True, "store": True},
    ("/v1/responses", "stream_options"): {"stream_options": {"include_obfuscation": False}, "stream": True},
    ("/v1/responses", "tools"): {"tools": [{"type": "function", **FUNCTION}]},
    ("/v1/responses", "tool_choice"): {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ("/v1/messages", "context_management"): {"context_management": {"edits": []}},
    ("/v1/messages", "tools"): {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
    ("/v1/messages/count_tokens", "tools"): {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
    ("/api/chat", "tools"): {"tools": TOOLS},
    ("/api/chat", "think"): {"think": True},
    ("/api/generate", "think"): {"think": True},
    **{(f"/api/{name}", "top_logprobs"): {"top_logprobs": 1, "logprobs": True} for name in ("chat", "generate")},
    **{(f"/api/{name}", "logprobs"): {"logprobs": True} for name in ("chat", "generate")},
}
"""All that is sent for a field whose value depends on the route, or needs another field."""
REFUSED: dict[str, Any] = {"tools": [{}], "functions": [{}], "modalities": ["audio"], "service_tier": "flex"}
"""A value with an effect for fields that refuse it; others refuse any text."""
LACKING: dict[str, Any] = {
    "conversation": "conv_none",
    "images": ["x"],
    "previous_response_id": "resp_none",
    "chat_template": "x",
    "documents": [{"text": "x"}],
    "suffix": "x",
    **dict.fromkeys(("beam_search_diversity_rate", "length_penalty", "top_p_decay", "top_p_min"), 0.5),
    **dict.fromkeys(("beam_width", "no_repeat_ngram_size"), 2),
    "use_beam_search": True,
    "best_of": 2,
    "lora_request": {"lora_name": "none"},
    "rag": {"collection": "docs"},
}
"""Fields that need what the server of this test lacks: another runtime, an adapter, a pipeline, eyes, a store."""
OF_CHAT_MODELS = {
    *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    *("reasoning_effort", "include_reasoning", "reasoning", "think", "output_format"),
}
"""Fields that need a model that reasons and calls tools."""
WITHOUT_EFFECT = {each: each for each in ("store", "verbosity")} | {
    "chat_template_kwargs": "chat_template_kwargs.messages_"
}
"""Fields of which the server of this test warns that they change nothing with it."""
GRAMMARS = {
    "format",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "structural_tag",
    "response_format",
    "structured_outputs",
}
"""Fields that need a real tokenizer; test_constraints.py sends them."""
LACKING_ON_VLLM = {"typical_p"}
ROWS = [row for row in rows() if row.route in BODIES and row.name not in {*BODIES[row.route], *GRAMMARS}]


def _id(row: FieldRow) -> str:
    return f"{row.route.removeprefix('/v1/')}-{row.name}"


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_a_field_is_treated_as_the_page_says(
    live: LiveServer, chat_live: LiveServer, pytestconfig: pytest.Config, row: FieldRow
) -> None:
    is_on_vllm = pytestconfig.getoption("on_vllm")
    given, server = FIELDS.get((row.route, row.name)), chat_live if row.name in OF_CHAT_MODELS else live
    if row.treatment is Treatment.REFUSED or (row.name in LACKING_ON_VLLM and is_on_vllm):
        refuse(live, row, REFUSED.get(row.name, VALUES.get(row.name, "x")))
    elif given is None and row.name in LACKING:
        refuse(live, row, LACKING[row.name])
    else:
        value = "x" if row.treatment is Treatment.IGNORED else VALUES.get(row.name)
        response = server.post(row.route, BODIES[row.route] | (given or {row.name: value}))
        assert (given or value) is not None and response.status_code == 200, response.text
        assert response.headers.get("x-sluice-warning") == expected_warning(row)


def expected_warning(row: FieldRow) -> str | None:
    if row.treatment is Treatment.IGNORED:
        return f"ignored unknown fields: {row.name}"
    has_no_effect = row.name in WITHOUT_EFFECT and row.route != "/v1/responses"
    return f"fields without effect here: {WITHOUT_EFFECT[row.name]}" if has_no_effect else None


def refuse(live: LiveServer, row: FieldRow, value: Any) -> None:
    response = live.post(row.route, BODIES[row.route] | {row.name: value})
    assert response.status_code in (400, 404), response.text
    assert row.name in response.text or (row.name == "lora_request" and "no LoRA adapter 'none'" in response.text)
