from benchmarks.gate_fill import measure


def test_a_shared_prefix_takes_no_more_iterations_where_it_counts_once() -> None:
    figures = measure(num_requests=48, prefixes=(1024,))
    assert [figure.subject for figure in figures[::2]] == ["TensorRT-LLM 1.2", "TensorRT-LLM 1.3"]
    for once, summed in zip(figures[::2], figures[1::2], strict=True):
        assert once.target is not None and once.target.is_met_by(once.median)
        assert summed.median > 1.9
