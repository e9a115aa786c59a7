from benchmarks.rag.orchestration import NUM_STEPS, TARGET, measure


def test_a_step_of_an_ensemble_costs_little() -> None:
    per_step, per_piece = measure(3, num_requests=50)
    assert (per_step.subject, per_step.unit, len(per_step.samples)) == (f"each of {NUM_STEPS} steps", "us", 3)
    assert TARGET.is_met_by(min(per_step.samples))
    assert len(per_piece.samples) == 3
