from sluice.engine.recent import Recent


def fill(most: int, *items: int) -> Recent[int]:
    recent: Recent[int] = Recent(most)
    for item in items:
        recent.append(item)
    return recent


def test_who_knows_the_first_items_gets_the_others() -> None:
    recent = fill(3, 1, 2, 3, 4)
    assert recent.count == 4 and list(recent) == [2, 3, 4]
    assert recent.since(4) == [] and recent.since(2) == [3, 4]
    assert recent.since(0) == [2, 3, 4], "the first one is no longer kept"
    assert recent.since(9) == [2, 3, 4], "who knows more knows another's"


def test_what_another_has_is_taken_once() -> None:
    recent = fill(8, 1, 2)
    recent.merge(4, [2, 3, 4])
    recent.merge(4, [2, 3, 4])
    recent.merge(3, [3])
    assert list(recent) == [1, 2, 3, 4] and recent.count == 4
    recent.merge(10, [9, 10])
    assert list(recent) == [1, 2, 3, 4, 9, 10] and recent.count == 10, "four were left out"
    recent.clear()
    assert not list(recent) and recent.count == 0
