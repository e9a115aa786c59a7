"""Folders of a model with the bundled tokenizer and a chat template with tools and reasoning."""

import json
import shutil
from pathlib import Path

HERMES_TEMPLATE = """\
{%- if tools %}<|system|>Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|user|><tool_response>{{ message.name }}: {{ message.content }}</tool_response><|end|>
{%- else %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

THINKING = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif opens %}<think>\n{% endif %}"
"""Ends a template of a model that reasons."""
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def write_chat_folder(
    tokenizer: Path,
    path: Path,
    template: str = HERMES_TEMPLATE,
    markers: tuple[str, ...] = (),
    *,
    is_special: bool = False,
) -> Path:
    """Write a folder with the tokenizer, a chat template, and the `markers` as added tokens, special ones where
    `is_special`. Return it."""
    shutil.copytree(tokenizer, path)
    (path / "chat_template.jinja").write_text(template)
    file = path / "tokenizer.json"
    document = json.loads(file.read_text())
    first = len(document["model"]["vocab"])
    flags = {"special": is_special, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
    document["added_tokens"] += [{"id": first + n, "content": each, **flags} for n, each in enumerate(markers)]
    file.write_text(json.dumps(document))
    return path
