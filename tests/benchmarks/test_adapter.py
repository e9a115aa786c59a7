from benchmarks.adapter import RUNNING, measure


def test_a_figure_for_each_number_of_running_requests() -> None:
    figures = measure(1, num_steps=5)
    assert [figure.name for figure in figures] == [f"adapter step, {num_running} running" for num_running in RUNNING]
    assert all(len(figure.samples) == 1 for figure in figures)
