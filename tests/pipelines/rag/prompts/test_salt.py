from pipelines.rag.prompts.salt import derived_salt, salt_of


def test_what_all_may_see_is_shared_by_all() -> None:
    assert derived_salt("", "") == ""


def test_tenants_and_owners_have_their_own() -> None:
    salts = [
        derived_salt("a", ""),
        derived_salt("b", ""),
        derived_salt("", "a"),
        derived_salt("a", "b"),
        derived_salt("ab", ""),
    ]
    assert len(set(salts)) == 5
    assert derived_salt("a", "b") == derived_salt("a", "b")
    assert "secret" not in derived_salt("tenant", "secret")


def test_an_explicit_salt_wins() -> None:
    assert salt_of("tenant", {"cache_salt": "mine", "collection_key": "k"}) == "mine"
    assert salt_of("tenant", {"collection_key": "k"}) == derived_salt("tenant", "k")
    assert salt_of("", {}) == ""
