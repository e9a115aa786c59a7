from benchmarks.offline.comparison import (
    BATCH,
    ITL,
    batch_requests,
    figures_of,
    filling_requests,
    markdown,
    single_request,
)
from benchmarks.offline.engines import MODELS

SAMPLES = {
    (BATCH, "Sluice"): [2000.0, 1000.0, 3000.0],
    (BATCH, "vLLM"): [1000.0, 1000.0, 1000.0],
    (ITL, "Sluice"): [1.0, 2.0, 3.0],
    (ITL, "vLLM"): [2.0, 2.0, 2.0],
}


def test_ratios_are_paired_repeat_by_repeat() -> None:
    figures = {(figure.name, figure.subject): figure for figure in figures_of(MODELS[0], SAMPLES)}
    assert figures["S batch output", "Sluice / vLLM"].samples == (2.0, 1.0, 3.0)
    assert figures["S single ITL p50", "Sluice / vLLM"].samples == (0.5, 1.0, 1.5)


def test_a_peer_that_is_absent_has_no_ratio() -> None:
    assert not [figure for figure in figures_of(MODELS[0], SAMPLES) if "GenAI" in figure.subject]


def test_the_table_holds_medians_and_says_which_targets_are_missed() -> None:
    assert markdown(figures_of(MODELS[0], SAMPLES)).splitlines() == [
        "| | Sluice | vLLM | Sluice / vLLM |",
        "|---|---|---|---|",
        "| S batch output, tokens/s | 2,000 | 1,000 | 2 (>= 1.3) |",
        "| S single ITL p50, ms | 2 | 2 | 1 (<= 0.6, missed) |",
    ]


def lengths(requests: list[tuple[list[int], int]]) -> list[tuple[int, int]]:
    return [(len(token_ids), num_tokens) for token_ids, num_tokens in requests]


def test_every_repeat_has_the_same_lengths_and_other_tokens() -> None:
    first, second = batch_requests(8192, seed=1), batch_requests(8192, seed=2)
    assert lengths(first) == lengths(second)
    assert first == batch_requests(8192, seed=1)
    assert all(a[:16] != b[:16] for (a, _), (b, _) in zip(first, second, strict=True))
    assert single_request(8192, seed=1) != single_request(8192, seed=2)


def test_the_batch_is_what_the_page_says() -> None:
    sizes = lengths(batch_requests(100, seed=1))
    assert len(sizes) == 64
    assert all(32 <= prompt <= 256 and 64 <= output <= 192 for prompt, output in sizes)
    assert all(0 <= token < 100 for token_ids, _ in batch_requests(100, seed=1) for token in token_ids)
    assert lengths([single_request(100, seed=1)]) == [(128, 128)]


def test_a_share_cuts_the_outputs_only() -> None:
    whole, cut = lengths(batch_requests(100, seed=1)), lengths(batch_requests(100, seed=1, output_share=0.1))
    assert [prompt for prompt, _ in cut] == [prompt for prompt, _ in whole]
    assert [output for _, output in cut] == [output // 10 for _, output in whole]


def test_filling_writes_a_whole_cache_in_batches_of_prompts() -> None:
    batches = list(filling_requests(100, 28_086))
    assert [len(requests) for requests in batches] == [55]
    assert [len(requests) for requests in filling_requests(100, 262_144)] == [64] * 8
    assert all(lengths(requests) == [(512, 1)] * len(requests) for requests in batches)
