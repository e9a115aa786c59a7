from pipelines.rag.rag_prompt.request import choose_salt, derive_salt


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
