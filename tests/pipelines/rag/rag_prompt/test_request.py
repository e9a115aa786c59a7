import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.rag_prompt.assembly import join_system_messages, split_exchanges
from sluice.pipelines.rag.rag_prompt.backend import choose_salt, derive_salt, parse_history
from sluice.pipelines.text.types import ChatMessage


def test_history_is_a_json_array_of_messages() -> None:
    text = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
    assert parse_history(text) == (ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello"))
    assert parse_history("") == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{}", "history must be a JSON array of messages"),
        ("nonsense", "history must be a JSON array of messages"),
        ('[{"role": "user"}]', "content"),
        ('[{"role": "robot", "content": "beep"}]', "'robot' at index 0"),
    ],
)
def test_what_is_no_history_is_refused(text: str, fault: str) -> None:
    with pytest.raises(SluiceError, match=fault) as caught:
        parse_history(text)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "history")


def test_exchanges_begin_with_a_question() -> None:
    turns = [
        ChatMessage("system", "Be brief."),
        ChatMessage("assistant", "Welcome"),
        ChatMessage("user", "one"),
        ChatMessage("assistant", "1"),
        ChatMessage("user", "two"),
        ChatMessage("developer", "In English."),
    ]
    assert split_exchanges(turns) == [(turns[2], turns[3]), (turns[4],)]
    assert join_system_messages(turns) == "Be brief.\n\nIn English."


def test_what_all_may_see_is_shared_by_all() -> None:
    assert derive_salt("", "") == ""


def test_tenants_and_owners_have_their_own() -> None:
    salts = [
        derive_salt("a", ""),
        derive_salt("b", ""),
        derive_salt("", "a"),
        derive_salt("a", "b"),
        derive_salt("ab", ""),
    ]
    assert len(set(salts)) == 5
    assert derive_salt("a", "b") == derive_salt("a", "b")
    assert "secret" not in derive_salt("tenant", "secret")


def test_an_explicit_salt_wins() -> None:
    assert choose_salt("tenant", {"cache_salt": "mine", "collection_key": "k"}) == "mine"
    assert choose_salt("tenant", {"collection_key": "k"}) == derive_salt("tenant", "k")
    assert choose_salt("", {}) == ""
