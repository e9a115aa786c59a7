"""The process that renders chat templates of clients: `python -m sluice.pipelines.text.template_worker`.

It gets a connection for each template over its standard input, a Unix socket, and forks a child that renders that one
within limits of its own. So a template that never ends, or fills the memory, takes down its child alone. The process
ends when the server closes the socket.
"""

import os
import re
import resource
import signal
import socket
from typing import Any

import msgspec

from sluice.pipelines.text.template_forms import TemplateForms
from sluice.pipelines.text.template_probe import probe_forms

CPU_S = 1
"""Processor time that a template may take."""
MEMORY_BYTES = 256 << 20
"""Memory that a template may take besides the interpreter's own."""
MAX_CHARS = 1 << 24
"""Longest text that a template may write."""
_NICENESS = 5


class TemplateJob(msgspec.Struct, frozen=True):
    """A template, and what it is rendered with. `arguments` are its further variables. A job without turns asks for the
    forms of turns that the template takes."""

    template: str
    turns: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    arguments: dict[str, Any]


class TemplateResult(msgspec.Struct, frozen=True):
    """The text that a template wrote, or the reason why it wrote none; or the forms of turns that it takes."""

    text: str = ""
    error: str = ""
    forms: TemplateForms = TemplateForms()


_TOO_LARGE = TemplateResult(error=f"it takes more than {MEMORY_BYTES >> 20} MiB of memory")
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    import transformers.utils.chat_template_utils  # noqa: F401 - once, for all children

    server = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(server, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            server.close()
            _confine()
            with socket.socket(fileno=descriptors[0]) as connection:
                _serve(connection)
            os._exit(0)
        os.close(descriptors[0])


def _confine() -> None:
    os.nice(_NICENESS)
    with open("/proc/self/statm") as file:
        own_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MEMORY_BYTES, own_bytes + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(connection: socket.socket) -> None:
    try:
        with connection.makefile("rb") as file:
            job = msgspec.msgpack.decode(file.read(), type=TemplateJob)
        reply = msgspec.msgpack.encode(_render(job) if job.turns else _probe(job))
    except MemoryError:
        reply = msgspec.msgpack.encode(_TOO_LARGE)
    connection.sendall(reply)


def _probe(job: TemplateJob) -> TemplateResult:
    def render(turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        text = _text(msgspec.structs.replace(job, turns=turns, tools=tools))
        return text if len(text) <= MAX_CHARS else ""

    return TemplateResult(forms=probe_forms(render))


def _text(job: TemplateJob) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template(
        conversations=[job.turns],
        tools=job.tools,
        documents=job.documents,
        chat_template=job.template,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        **job.arguments,
    )
    rendered: str = text
    return rendered


def _render(job: TemplateJob) -> TemplateResult:
    try:
        text = _text(job)
    except MemoryError:
        return _TOO_LARGE
    except Exception as error:  # a template can raise anything
        return TemplateResult(error=_shown(error))
    if _HALF_PAIR.search(text):
        return TemplateResult(error="it writes half a surrogate pair, which is no character")
    if len(text) > MAX_CHARS:
        return TemplateResult(error=f"it writes {len(text)} characters; at most {MAX_CHARS} are allowed")
    return TemplateResult(text)


def _shown(error: Exception) -> str:
    return _HALF_PAIR.sub("\ufffd", str(error)) or type(error).__name__


if __name__ == "__main__":
    main()
