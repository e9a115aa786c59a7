"""What breaks the silence of a stream, as stock clients see it: not at all."""

from threading import Timer
from typing import Any

import openai

from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S

MESSAGES: Any = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


SILENCE_S = 0.3
"""Several times as long as a stream of this server is silent."""


def test_stock_clients_pass_over_what_breaks_a_silence(strict_live: LiveServer) -> None:
    import anthropic  # takes seconds, which one worker alone is to spend

    settings: Any = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
    runner, body = strict_live.runner, {**BODY, "extra_body": {"temperature": 0}}
    with (
        openai.OpenAI(base_url=f"{strict_live.url}/v1", **settings) as chats,
        anthropic.Anthropic(base_url=strict_live.url, **settings) as claude,
    ):
        whole = chats.chat.completions.create(**body).choices[0].message.content
        try:
            runner.hold_after(3)
            chunks = iter(chats.chat.completions.create(**body, stream=True))
            content = next(chunks).choices[0].delta.content or ""
            Timer(SILENCE_S, runner.release).start()
            assert content + "".join(each.choices[0].delta.content or "" for each in chunks) == whole
            runner.hold_after(3)
            with claude.messages.stream(**body) as stream:
                begun = next(stream.text_stream)
                Timer(SILENCE_S, runner.release).start()
                assert begun + "".join(stream.text_stream) == whole
            runner.hold_after(3)
            with strict_live.send("/v1/messages", {**BODY, "stream": True}) as connection:
                answer = b""
                while answer.count(PING) < 2:
                    answer += connection.recv(65536)
        finally:
            runner.release()
