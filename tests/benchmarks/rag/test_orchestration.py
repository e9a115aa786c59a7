from benchmarks.rag.orchestration import NUM_STEPS, measure


def test_what_a_step_of_an_ensemble_costs_is_measured() -> None:
    per_step, per_piece = measure(3, num_requests=50)
    assert (per_step.subject, per_step.unit, len(per_step.samples)) == (f"each of {NUM_STEPS} steps", "us", 3)
    assert len(per_piece.samples) == 3
