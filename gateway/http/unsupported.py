"""Fields of OpenAI's and vLLM's APIs that would change the answer and that Sluice does not have.

Ignoring one would silently give another answer than was asked for, so each is refused unless it has
a value that asks for nothing. Null always does.
"""

from typing import Any

NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    # of the other route, or of several answers
    "echo": (False,),
    "top_logprobs": (0,),
    # what the answer shows
    "suffix": ("",),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # constraints on tokens
    "structured_outputs.whitespace_pattern": (),
    "structured_outputs.structural_tag": (),
    "structured_outputs.disable_any_whitespace": (False,),
    "structured_outputs.disable_additional_properties": (False,),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    # the prompt
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    # service and storage
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options.continuous_usage_stats": (False,),
    # a message's
    "messages.tool_calls": ([],),
    "messages.tool_call_id": (),
    "messages.function_call": (),
    "messages.audio": (),
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether `value` may be given for `name`, one of the fields above, because it changes nothing."""
    return any(type(value) is type(neutral) and value == neutral for neutral in NOTHING_ASKED[name])
