"""Renders conversations: by a model's chat template on this thread, by a client's template in a sandbox."""

import inspect
import re
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jinja2

from sluice.errors import SluiceError, invalid
from sluice.pipelines.text.template_forms import SystemPlace, TemplateForms, Turn, in_parts, shape_turns
from sluice.pipelines.text.template_probe import probe_forms
from sluice.pipelines.text.template_sandbox import TemplateSandbox
from sluice.pipelines.text.template_worker import TemplateJob
from sluice.pipelines.text.turns import with_whole_texts
from sluice.pipelines.text.types import TemplateOptions

_MAX_ERROR_CHARS = 300
_DOCUMENTS = "documents"


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a tokenizer, and find the forms of turns that its template takes."""
        self._tokenizer = tokenizer
        render = partial(self._render_own, add_generation_prompt=True)
        self.forms = probe_forms(render) if self.text else TemplateForms()

    @property
    def text(self) -> str:
        """Its text, that of all where there are several; "" where there is none."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that it refers to, variables among them."""
        return names_in_template(self.text)

    @cached_property
    def sandbox(self) -> TemplateSandbox:
        """Renders the templates that clients send instead."""
        return TemplateSandbox()

    def check(self, options: TemplateOptions) -> None:
        """Raise INVALID for options that a template cannot be rendered with, or takes no notice of."""
        if options.template is None and not self.text:
            message = "this model has no chat template: use completions, or add a chat_template to its directory"
            raise invalid("messages", message)
        names = self.names if options.template is None else names_in_template(options.template)
        if options.documents and _DOCUMENTS not in names:
            message = (
                f"documents must be left out: the chat template has no place for them, got {len(options.documents)}"
            )
            raise invalid(_DOCUMENTS, message)
        taken = sorted(options.arguments.keys() & self._reserved_names) if options.arguments else ()
        if taken:
            name = f"chat_template_kwargs.{taken[0]}"
            raise invalid(name, f"{name} is not allowed: the server sets that variable itself")

    def render(self, turns: list[Turn], options: TemplateOptions, forms: TemplateForms) -> str:
        """Return the text of a conversation. Raises INVALID where the template refuses it."""
        tools, documents = list(options.tools) or None, list(options.documents) or None
        adds, continues = options.adds_generation_prompt, options.continues_final_message
        turns = _in_form(turns, options.image_placeholders, forms)
        if options.template is not None:
            arguments = {**self._tokenizer.special_tokens_map, **options.arguments}
            return self.sandbox.render(
                TemplateJob(options.template, turns, tools, documents, adds, continues, arguments)
            )
        try:
            return self._render_own(
                turns,
                tools,
                documents=documents,
                add_generation_prompt=adds,
                continue_final_message=continues,
                **options.arguments,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise _refused(error) from error

    def _render_own(self, turns: list[Turn], tools: list[dict[str, Any]] | None, **options: Any) -> str:
        """Return the text that `apply_chat_template` makes, which takes no content of null."""
        from transformers.utils.chat_template_utils import render_jinja_template

        [text], _ = render_jinja_template(
            conversations=[turns],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(tools=tools),
            **self._tokenizer.special_tokens_map,
            **options,
        )
        rendered: str = text
        return rendered

    def forms_of_client(self, options: TemplateOptions) -> TemplateForms:
        """Return the forms of turns that a client's template takes. Call it where the sandbox runs work."""
        assert options.template is not None
        return self.sandbox.probe(options.template, {**self._tokenizer.special_tokens_map, **options.arguments})

    @cached_property
    def _reserved_names(self) -> frozenset[str]:
        """Variables that the server sets, and parameters of the functions that render."""
        from transformers.utils.chat_template_utils import render_jinja_template

        functions = (self._tokenizer.apply_chat_template, render_jinja_template)
        parameters = (name for function in functions for name in inspect.signature(function).parameters)
        return frozenset({"messages", *parameters, *self._tokenizer.special_tokens_map})


def _in_form(turns: list[Turn], placeholders: Sequence[str], forms: TemplateForms) -> list[Turn]:
    """Return the turns as a template with these forms takes them."""
    is_free = forms.system is SystemPlace.ANYWHERE and not forms.merges_turns
    if not is_free or any("tool_calls" in turn or "reasoning_content" in turn for turn in turns):
        turns = shape_turns(turns, forms)
    if placeholders and not forms.takes_images:
        turns = with_whole_texts(turns, placeholders)
    return in_parts(turns) if forms.has_parts else turns


def names_in_template(template: str) -> frozenset[str]:
    """Return every name in a chat template, variables among them."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", template))


def _refused(error: Exception) -> SluiceError:
    reason = str(error)[:_MAX_ERROR_CHARS]
    return invalid("messages", f"the model's chat template refuses these messages: {reason}")
