"""What breaks the silence of a stream, as stock clients see it: not at all."""

from typing import Any

import anthropic
import openai

from tests.gateway.http.live import MODEL, PATIENCE_S, LiveServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def test_stock_clients_pass_over_what_breaks_a_silence(strict_live: LiveServer) -> None:
    """Both clients' streams are silent at least as long as the one whose pings are read."""
    settings: Any = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
    runner, body = strict_live.runner, {**BODY, "extra_body": {"temperature": 0}}
    with (
        openai.OpenAI(base_url=f"{strict_live.url}/v1", **settings) as chats,
        anthropic.Anthropic(base_url=strict_live.url, **settings) as claude,
    ):
        try:
            runner.hold_after(3)
            chunks = iter(chats.chat.completions.create(**body, stream=True))
            first = next(chunks)
            runner.hold_after(3)
            with claude.messages.stream(**body) as stream:
                pieces = iter(stream.text_stream)
                begun = next(pieces)
                runner.hold_after(3)
                with strict_live.send("/v1/messages", {**BODY, "stream": True}) as connection:
                    answer = b""
                    while answer.count(PING) < 2:
                        answer += connection.recv(65536)
                runner.release()
                message = begun + "".join(pieces)
            content = "".join(each.choices[0].delta.content or "" for each in (first, *chunks))
        finally:
            runner.release()
        whole = chats.chat.completions.create(**body)
    assert message == content == whole.choices[0].message.content
