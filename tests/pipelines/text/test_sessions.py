"""The table of sessions: what is kept of a prompt, for how long, and what only it can tell."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.engine.types import EventDetail, Eviction
from sluice.pipelines.text.model import digest_session
from sluice.pipelines.text.sessions import PromptWatch, SessionTable, describe_miss, merge_rows
from sluice.pipelines.text.types import (
    CacheMiss,
    CacheMissReason,
    ChatMessage,
    Conversation,
    EncodedPrompt,
    TemplateOptions,
    TextRequest,
)

SIZE = 4
NO_OPTIONS = TemplateOptions()


def ask(
    table: SessionTable,
    messages: list[ChatMessage] | str,
    token_ids: list[int],
    num_cached: int,
    session: str = "s",
    replica: str = "",
    evicted: Eviction | None = None,
    images: tuple[bytes, ...] = (),
    options: TemplateOptions = NO_OPTIONS,
) -> CacheMiss | None:
    """Send a prompt of which so many tokens are cached, in blocks of 4."""
    sent = messages if isinstance(messages, str) else Conversation(tuple(messages), options)
    prompt = EncodedPrompt(sent, token_ids, images)
    request = TextRequest(request_id="r", prompt=prompt, session=session)
    watch = PromptWatch(table, table.open(session, request, "m"), request, prompt, "m", SIZE, lambda: replica)
    return watch.explain(EventDetail(num_cached_tokens=num_cached, evicted=evicted))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def user(text: str, reasoning: str = "") -> ChatMessage:
    return ChatMessage("user", text, reasoning)


def reason(miss: CacheMiss | None) -> tuple[str, str, int] | None:
    return None if miss is None else (miss.reason, miss.at, miss.missed_tokens)


def test_a_message_that_changed_without_a_token_is_not_the_cause() -> None:
    table, ids = SessionTable(), list(range(40))
    ask(table, [user("a", "thought"), user("b")], ids[:20], 0)
    assert ask(table, [user("a"), user("b"), user("c"), user("d")], ids, 20) is None
    found = ask(table, [user("a"), user("b"), user("x"), user("d")], [*ids[:24], *[99] * 16], 24)
    assert reason(found) == ("messages_changed", "messages[2]", 12)
    both = ask(table, [user("a", "new thought"), user("b"), user("y"), user("d")], [*ids[:24], *[98] * 16], 24)
    assert reason(both) == ("messages_changed", "messages[2]", 12)


@pytest.mark.parametrize("options", [TemplateOptions(tools=({"name": "f"},)), TemplateOptions(arguments={"a": 1})])
def test_an_option_that_changed_without_a_token_is_not_the_cause_later(options: TemplateOptions) -> None:
    table, ids = SessionTable(), list(range(40))
    ask(table, [user("a"), user("b")], ids, 0)
    assert ask(table, [user("a"), user("b")], ids, 36, options=options) is None
    found = ask(table, [user("a"), user("x")], [*ids[:20], *[99] * 20], 20, options=options)
    assert reason(found) == ("messages_changed", "messages[1]", 16)


def test_messages_that_were_joined_without_a_token_are_known_later() -> None:
    table, ids = SessionTable(), list(range(60))
    ask(table, [user("a"), user("b")], ids[:20], 0)
    assert ask(table, [user("a and b")], ids[:40], 20) is None
    found = ask(table, [user("a and b"), user("c")], [*ids[:36], *[99] * 24], 36)
    assert reason(found) == ("rendering_changed", "", 4)


def test_the_same_messages_in_other_tokens_are_the_template_s_doing() -> None:
    table, ids = SessionTable(), list(range(40))
    ask(table, [user("a")], ids[:20], 0)
    found = ask(table, [user("a"), user("b")], [*ids[:16], *[99] * 24], 16)
    assert reason(found) == ("rendering_changed", "", 4)


def test_of_a_loss_and_a_change_the_first_in_the_prompt_counts() -> None:
    table, ids = SessionTable(), list(range(40))
    ask(table, [user("a"), user("b")], ids, 0)
    found = ask(table, [user("a"), user("x")], [*ids[:20], *[99] * 20], 8, evicted=Eviction(2.5, "", "gone"))
    assert found == CacheMiss(CacheMissReason.EVICTED, 28, 8, evicted_s=2.5, evicted_for="another session")
    assert describe_miss(found) == "evicted 2.5 s ago, for another session"


@pytest.mark.parametrize(
    ("replicas", "evicted", "expected"),
    [
        (("0", "1"), Eviction(1.0), "another_replica"),
        (("0", "0"), Eviction(1.0, "", "s"), "evicted"),
        (("", ""), None, "not_in_cache"),
    ],
)
def test_the_same_prompt_that_is_not_cached_was_lost(
    replicas: tuple[str, str], evicted: Eviction | None, expected: str
) -> None:
    table, ids = SessionTable(), list(range(41))
    for replica in replicas:
        found = ask(table, [user("a")], ids, 0, replica=replica, evicted=evicted)
    assert reason(found) == (expected, "", 40)
    assert found is not None
    assert found.before == ("0" if expected == "another_replica" else "")
    assert describe_miss(found)


def test_the_last_token_and_blocks_that_are_not_full_are_never_missed() -> None:
    table, ids = SessionTable(), list(range(12))
    assert reason(ask(table, [user("a")], ids, 0)) == ("first_request", "", 8)
    assert ask(table, [user("a")], ids, 8) is None
    assert ask(table, [user("x")], [9, 9, 9], 0) is None


def test_a_prompt_with_images_is_not_compared() -> None:
    table = SessionTable()
    assert ask(table, [user("a")], list(range(40)), 0, images=(b"png",)) is None
    assert table.latest(1)[0].prompt is None


def test_sessions_are_forgotten_beyond_their_number_and_their_bytes() -> None:
    table = SessionTable(max_sessions=3)
    for name in "abcad":
        ask(table, [user("a")], [1, 2], 0, session=name)
    assert [each.name for each in table.latest(9)] == ["d", "a", "c"]
    small, ids = SessionTable(max_digest_bytes=2000), list(range(400))
    for name in "abc":
        ask(small, "text", ids, 0, session=name)
    assert [each.name for each in small.latest(9)] == ["c", "b"]
    for number in range(2, 12):  # one that grows
        ask(small, "text", ids * number, 400 * (number - 1), session="c")
    assert [each.name for each in small.latest(9)] == ["c"], "the last one stays, however long"
    ask(small, "text", ids, 0, session="d")
    assert [each.name for each in small.latest(9)] == ["d"]


@pytest.mark.parametrize("value", ["x" * (1 << 22), [[]] * 60_000, {str(n): n for n in range(60_000)}])
def test_an_endless_argument_of_a_template_is_not_read(value: object) -> None:
    table, ids = SessionTable(), list(range(40))
    for number in (1, 2):
        options = TemplateOptions(arguments={"huge": [value, number], "small": number})
        found = ask(table, [user("a")], [number, *ids], 0, options=options)
    assert reason(found) == ("template_changed", "chat_template_kwargs.small", 40)


def test_the_rows_of_one_session_in_several_processes_are_one() -> None:
    tables = SessionTable(), SessionTable()
    for table, turns in zip(tables, (1, 3), strict=True):
        for _ in range(turns):
            ask(table, [user("a")], list(range(40)), 0)
        table.open("s", TextRequest(request_id="r", prompt="", session="s"), "m").add(40, 10, 2)
    ask(tables[0], [user("a")], [1, 2], 0, session="other")
    now = [each.latest(9)[-1].seen_at for each in tables]
    rows = [row for table, at in zip(tables, (now[0] + 5, now[1] + 1), strict=True) for row in table.rows(9, at)]
    merged = {row.name: row for row in merge_rows(rows, 9)}
    assert [*merged] == ["s", "other"]
    both = merged["s"]
    assert (both.num_turns, both.prompt_tokens, both.cached_tokens, both.seen_s) == (6, 80, 20, 1.0)
    assert (both.missed_tokens, both.miss) == (72, "the cache does not have them any more")
    assert len(merge_rows(rows, 1)) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def send_tool(table: SessionTable, tool: object, argument: object, first: int) -> tuple[str, str, int] | None:
    options = TemplateOptions(tools=({"name": tool},), arguments={"a": argument})
    return reason(ask(table, [user("a")], [first, *range(40)], 0, options=options))


@given(json_values)
@example("\ud800")
@example(2**70)
def test_whatever_tools_and_arguments_have_in_them_the_change_is_named(value: object) -> None:
    table = SessionTable()
    send_tool(table, value, value, 1)
    assert send_tool(table, value, value, 2) == ("rendering_changed", "", 40)
    assert send_tool(table, [value, 1], value, 3) == ("tools_changed", "tools[0]", 40)
    assert send_tool(table, [value, 1], [value, 2], 4) == ("template_changed", "chat_template_kwargs.a", 40)


def test_values_that_are_nested_endlessly_are_no_error() -> None:
    table, value = SessionTable(), nested(40_000)
    send_tool(table, value, value, 1)
    assert send_tool(table, value, value, 2) == ("rendering_changed", "", 40)


def test_names_are_kept_in_part_however_long() -> None:
    table = SessionTable()
    long = "x" * (1 << 20)
    request = TextRequest(request_id="r", prompt="", session=long, parent_session=long)
    use = table.open("k", request, "m")
    assert {len(use.name), len(use.parent)} == {200}
    assert digest_session("", long) == digest_session("", long + "y"), "its beginning is read, in microseconds"
    assert digest_session("", long[:64000]) != digest_session("", long[:64001])
