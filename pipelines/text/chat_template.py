"""Renders conversations: by a model's chat template on this thread, by a client's template in a sandbox."""

import asyncio
import inspect
import re
import socket
import subprocess
import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeVar

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.text.template_forms import (
    SystemPlace,
    TemplateForms,
    Turn,
    in_parts,
    shape_turns,
    with_usual_keywords,
)
from sluice.pipelines.text.template_probe import probe_forms
from sluice.pipelines.text.template_worker import CPU_S, MEMORY_BYTES, TemplateJob, TemplateResult
from sluice.pipelines.text.turns import with_whole_texts
from sluice.pipelines.text.types import TemplateOptions

_WORKER = "sluice.pipelines.text.template_worker"
_NUM_THREADS = 8
"""Most templates that are rendered at a time; further ones wait."""
_WALL_S = 30.0
"""Longest time for an answer, the start of the process included; `CPU_S` ends a template much earlier."""
_NUM_PROBED = 64
"""Templates whose forms are kept."""
_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
"""The worker's environment: it has none of the server's secrets."""

T = TypeVar("T")
_MAX_ERROR_CHARS = 300
_SEARCHED_CHARS = 1 << 18
"""Longest conversation that is tried in parts, to find the turn that a template refuses."""
_DOCUMENTS = "documents"
_HAS_FORMS = frozenset({"tool_calls", "reasoning_content"})


class TemplateSandbox:
    """Renders templates in a worker process, which starts with the first one. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: _Worker | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="template")
        self._probed: dict[str, TemplateForms] = {}

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which renders templates, on a thread that others do not wait for."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def render(self, job: TemplateJob) -> str:
        """Return the text of a template. Raises INVALID (param "chat_template") for one that fails or takes too much,
        and UNAVAILABLE where no process can be started."""
        result = self._run_job(job)
        if result is None:
            size = f"{CPU_S} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
            raise invalid("chat_template", f"chat_template takes more than {size}")
        if result.error:
            raise invalid("chat_template", f"chat_template cannot be rendered: {result.error[:_MAX_ERROR_CHARS]}")
        return result.text

    def probe(self, template: str, arguments: dict[str, Any]) -> TemplateForms:
        """Return the forms of turns that a template takes, the usual ones for one that takes too much. Raises
        UNAVAILABLE as `render`."""
        forms = self._probed.get(template)
        if forms is None:
            result = self._run_job(TemplateJob(template, [], None, None, True, False, arguments))
            forms = TemplateForms() if result is None else result.forms
            with self._lock:
                while len(self._probed) >= _NUM_PROBED:
                    del self._probed[next(iter(self._probed))]
                self._probed[template] = forms
        return forms

    def _run_job(self, job: TemplateJob) -> TemplateResult | None:
        """Return the result of a job, None for one that takes too much."""
        try:
            reply = self._exchange(msgspec.msgpack.encode(job))
        except OSError as error:
            message = f"the server cannot render chat templates of requests now: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
        return msgspec.msgpack.decode(reply, type=TemplateResult) if reply else None

    def _exchange(self, job: bytes) -> bytes:
        """Return the reply to a job; an empty one where its process was ended."""
        with self._connect() as connection:
            connection.settimeout(_WALL_S)
            try:
                connection.sendall(job)
                connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as file:
                    return file.read()
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                return b""

    def _connect(self) -> socket.socket:
        """Return a connection to a new child of the worker, which is replaced where it has ended."""
        with self._lock:
            if self._worker is None or not self._worker.is_running:
                self._worker = _Worker()
            return self._worker.connect()


class _Worker:
    """The worker process. It ends with this object."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = (
                sys.executable,
                "-c",
                f"import sys; sys.path[:] = {sys.path!r}; from {_WORKER} import main; main()",
            )
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=_ENV, start_new_session=True)
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
        return ours


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


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
        if options.template is not None:
            shaped = _in_form(turns, options.image_placeholders, forms)
            tools, documents = _tools(options, forms), list(options.documents) or None
            adds, continues = options.adds_generation_prompt, options.continues_final_message
            arguments = {**self._tokenizer.special_tokens_map, **options.arguments}
            return self.sandbox.render(
                TemplateJob(options.template, shaped, tools, documents, adds, continues, arguments)
            )
        try:
            return self._render_turns(turns, options, forms)
        except Exception as error:  # a template can raise anything
            index = self._find_refused(turns, options, forms, str(error))
            raise _refused(error, turns, index) from error

    def _render_turns(self, turns: list[Turn], options: TemplateOptions, forms: TemplateForms) -> str:
        """Return the text of a conversation, or raise what the model's own template raises. Where that takes no tool
        with keywords of odd types, it gets the tools without those."""
        shaped = _in_form(turns, options.image_placeholders, forms)

        def render(tools: list[dict[str, Any]] | None) -> str:
            return self._render_own(
                shaped,
                tools,
                documents=list(options.documents) or None,
                add_generation_prompt=options.adds_generation_prompt,
                continue_final_message=options.continues_final_message,
                **options.arguments,
            )

        tools = _tools(options, forms)
        try:
            return render(tools)
        except Exception:
            usual = with_usual_keywords(tools)
            if usual == tools:
                raise
            return render(usual)

    def _find_refused(
        self, turns: list[Turn], options: TemplateOptions, forms: TemplateForms, reason: str
    ) -> int | None:
        """Return the index of the turn with which the template begins to refuse a conversation for this reason; None
        where it refuses any, and for a conversation that takes too long to be tried in parts."""
        if sum(len(turn["content"] or "") for turn in turns) > _SEARCHED_CHARS:
            return None

        def is_refused(tried: list[Turn]) -> bool:
            try:
                self._render_turns(tried, options, forms)
            except Exception as error:
                return str(error) == reason
            return False

        if is_refused([{"role": "user", "content": ""}]):
            return None
        return bisect_left(range(1, len(turns)), True, key=lambda num_turns: is_refused(turns[:num_turns]))

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
    if not is_free or any(turn["role"] == "tool" or not _HAS_FORMS.isdisjoint(turn) for turn in turns):
        turns = shape_turns(turns, forms)
    if placeholders and not forms.takes_images:
        turns = with_whole_texts(turns, placeholders)
    return in_parts(turns) if forms.has_parts else turns


def _tools(options: TemplateOptions, forms: TemplateForms) -> list[dict[str, Any]] | None:
    return list(options.tools) or ([] if forms.has_empty_tools else None)


def names_in_template(template: str) -> frozenset[str]:
    """Return every name in a chat template, variables among them."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", template))


def _refused(error: Exception, turns: list[Turn], index: int | None) -> SluiceError:
    reason = str(error)[:_MAX_ERROR_CHARS] or type(error).__name__
    what = "these messages" if index is None else f"messages[{index}], of the role {turns[index]['role']}"
    return invalid("messages", f"the model's chat template refuses {what}: {reason}")
