"""What a client keeps of an engine's views."""

import asyncio

from sluice.engine.client.viewing import EngineViewer
from sluice.engine.frames import AskView, EngineView, StepRecord, TenantTokens


def view(num_steps: int, first: int, *waits: float) -> EngineView:
    """Return a view that has the steps from `first` on."""
    steps = [StepRecord(float(number), 1.0, 0, 1, 1) for number in range(first, num_steps)]
    return EngineView(num_steps, steps, len(waits), list(waits), {"a": TenantTokens(1, num_steps)})


def test_views_that_overlap_are_joined() -> None:
    asked: list[AskView] = []

    async def watch() -> EngineViewer:
        viewer = EngineViewer(asked.append)
        answered = viewer.ask(5.0)
        assert viewer.ask(5.0) is answered, "one answer serves both"
        viewer.take(view(3, 0, 0.5))
        assert answered.done()
        viewer.ask(9.0)
        viewer.take(view(3, 0, 0.5))  # the answer to the second question
        viewer.take(view(5, 3, 0.5))
        return viewer

    viewer = asyncio.run(watch())
    assert [each.at_s for each in viewer.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert asked[-1] == AskView(3, 1, 9.0)


def test_an_engine_that_counts_anew_is_followed() -> None:
    async def watch() -> EngineViewer:
        viewer = EngineViewer(lambda question: None)
        viewer.ask(5.0)
        viewer.take(view(7, 0, 0.1))
        viewer.take(view(2, 0))
        return viewer

    viewer = asyncio.run(watch())
    assert viewer.steps.count == 2 and [each.at_s for each in viewer.steps] == [0.0, 1.0]
    assert viewer.tenants == {"a": TenantTokens(1, 2)}
