"""Headers of answers that came through a route or a cache: `x-sluice-target`, `-attempts` and `-cache`."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.pipelines.answers.notes import AnswerNotes, current_notes

ANSWER_HEADERS = ("x-sluice-target", "x-sluice-attempts", "x-sluice-cache")


class AnswerHeadersMiddleware:
    """Adds what the notes of an answer say when it starts. Only servers with routes or a cache have it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes = AnswerNotes()
        current_notes.set(notes)

        async def send_with_notes(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *notes.headers()]
            await send(message)

        await self._app(scope, receive, send_with_notes)
