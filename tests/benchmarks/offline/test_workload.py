from benchmarks.offline.workload import batch, filling, single


def lengths(requests: list[tuple[list[int], int]]) -> list[tuple[int, int]]:
    return [(len(token_ids), num_tokens) for token_ids, num_tokens in requests]


def test_every_repeat_has_the_same_lengths_and_other_tokens() -> None:
    first, second = batch(8192, seed=1), batch(8192, seed=2)
    assert lengths(first) == lengths(second)
    assert first == batch(8192, seed=1)
    assert all(a[:16] != b[:16] for (a, _), (b, _) in zip(first, second, strict=True))
    assert single(8192, seed=1) != single(8192, seed=2)


def test_the_batch_is_what_the_page_says() -> None:
    sizes = lengths(batch(100, seed=1))
    assert len(sizes) == 64
    assert all(32 <= prompt <= 256 and 64 <= output <= 192 for prompt, output in sizes)
    assert all(0 <= token < 100 for token_ids, _ in batch(100, seed=1) for token in token_ids)
    assert lengths([single(100, seed=1)]) == [(128, 128)]


def test_a_share_cuts_the_outputs_only() -> None:
    whole, cut = lengths(batch(100, seed=1)), lengths(batch(100, seed=1, output_share=0.1))
    assert [prompt for prompt, _ in cut] == [prompt for prompt, _ in whole]
    assert [output for _, output in cut] == [output // 10 for _, output in whole]


def test_filling_writes_a_whole_cache_in_batches_of_prompts() -> None:
    batches = list(filling(100, 28_086))
    assert [len(requests) for requests in batches] == [55]
    assert [len(requests) for requests in filling(100, 262_144)] == [64] * 8
    assert all(lengths(requests) == [(512, 1)] * len(requests) for requests in batches)
