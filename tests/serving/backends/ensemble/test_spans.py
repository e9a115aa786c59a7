"""Spans of ensembles."""

from serving.model import infer_one
from tests.recordings import find_span, parents, recorded
from tests.serving.backends.ensemble.parts import FunctionModel, Models, ensemble_config, load, request, simple_config


async def test_each_step_is_a_span_of_the_ensemble() -> None:
    models = Models(
        FunctionModel(simple_config("first"), lambda X: {"Y": X + 1}),
        FunctionModel(simple_config("second"), lambda X: {"Y": X * 10}),
    )
    model = await load(ensemble_config("first: X=a -> Y=b; second: X=b -> Y=z"), models)
    with recorded() as recording:
        await infer_one(model, request())
    assert recording.is_complete
    found = parents(recording)
    assert found["infer whole"] == "test"
    assert found["infer first"] == found["infer second"] == "infer whole"
    first, second = find_span(recording, "infer first"), find_span(recording, "infer second")
    assert first.ended_ns <= second.ended_ns
    assert find_span(recording, "infer whole").attributes["sluice.platform"] == "ensemble"
