from benchmarks.recovery import Stream, figures


def stream(texts: list[str], times_s: list[float]) -> Stream:
    return Stream(0, "m", texts, times_s)


def test_pauses_and_answers_are_compared_with_those_of_an_undisturbed_run() -> None:
    undisturbed = [stream(["a", "b", "c"], [0.0, 0.1, 0.3]), stream(["d", "e"], [0.0, 0.1])]
    disturbed = [stream(["a", "bc"], [1.0, 4.5]), stream(["d", "x"], [1.0, 4.0])]
    found = dict(figures(undisturbed, disturbed, killed_s=2.0, ready_s=3.5))
    assert found == {
        "kill to ready again": 1.5,
        "kill to first resumed token": 2.0,
        "longest pause of a stream": 3.5,
        "longest pause without a kill": 0.3 - 0.1,
        "same greedy answers": 1,
        "same sampled answers": 0,
    }


def test_every_stream_asks_something_of_its_own_and_always_the_same() -> None:
    bodies = [Stream(number, "m").body() for number in range(4)]
    assert len({tuple(body["prompt"]) for body in bodies}) == 4
    assert bodies == [Stream(number, "m").body() for number in range(4)]
    assert [body["temperature"] for body in bodies] == [0, 0.8, 0, 0.8]
