from benchmarks.offline.comparison import BATCH, ITL, figures_of
from benchmarks.offline.engines import MODELS
from benchmarks.offline.table import markdown

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
