"""One step of lookahead: the next step is launched before the last one's tokens are known, so that the device does not
wait for the host."""

from collections.abc import Callable
from dataclasses import dataclass

from sluice.engine.loop.recorder import StepRecorder
from sluice.engine.loop.sequences import Intake, RunningSequences
from sluice.engine.loop.step import BuiltBatch, commit_chosen, draws_ahead
from sluice.engine.runners.base import LaunchedStep, Runner
from sluice.engine.scheduling.planner import StepPlan
from sluice.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step on the device. Its sequences may end meanwhile, and their blocks be given to others: the device writes to
    them in the order of the steps."""

    plan: StepPlan[Sequence]
    built: BuiltBatch
    launched: LaunchedStep
    began: float
    """When the loop began with it."""
    launched_at: float


class Lookahead:
    """Launches steps, and commits each when the next one was launched. Used by the engine's thread alone."""

    def __init__(
        self,
        runner: Runner,
        sequences: RunningSequences,
        intake: Intake,
        recorder: StepRecorder,
        clock: Callable[[], float],
    ) -> None:
        self.under_way: StepUnderWay | None = None
        self._runner = runner
        self._sequences = sequences
        self._intake = intake
        self._recorder = recorder
        self._clock = clock
        self._ended = 0.0
        """When the last step ended."""

    def takes(self, plan: StepPlan[Sequence]) -> bool:
        """Return whether the step can be launched, behind the one under way: the device alone chooses its tokens. A
        sequence that was preempted behind a step would lose the token that it gives."""
        if self._sequences.drafter is not None or (plan.preempted and self.under_way is not None):
            return False
        if any(sequence.needs_host for sequence in plan.decode):
            return False
        return not any(chunk.sequence.needs_host for chunk in plan.prefill)

    def launch(self, plan: StepPlan[Sequence], built: BuiltBatch, began: float) -> StepUnderWay:
        """Launch the step of a plan that `takes` has accepted."""
        launched = self._runner.launch(built.step, draws_ahead(built))
        return StepUnderWay(plan, built, launched, began, self._clock())

    def follow(self, step: StepUnderWay | None) -> None:
        """Take the step that was launched as the one under way, now that the one before it is finished. The next plan
        builds on it."""
        self.under_way = step
        if step is None:
            return
        self._sequences.advance(step.plan)
        for sequence, row in zip(step.built.sampling, step.built.first_rows, strict=True):
            sequence.expect(row)

    def finish(self) -> None:
        """Wait for the step under way, if there is one, and commit its tokens. If it failed, its sequences do."""
        step, self.under_way = self.under_way, None
        if step is None:
            return
        # The device begins with it when it has ended the one before.
        began, run_began = max(step.began, self._ended), max(step.launched_at, self._ended)
        try:
            tokens = step.launched()
            self._ended = self._clock()
            self._recorder.record_run(run_began, self._ended)
            self._recorder.mark("run")
            self._sequences.note_computed(step.plan)
            self._sequences.end_step(step.plan, *commit_chosen(step.built, *tokens))
            self._recorder.mark("commit")
        except Exception:
            self._sequences.fail_step(step.plan)
        ended = self._recorder.end(step.plan, len(self._sequences.running), len(self._intake), began)
        self._intake.observe_step(ended, ended.seconds)


def make_lookahead(
    runner: Runner, sequences: RunningSequences, intake: Intake, recorder: StepRecorder, clock: Callable[[], float]
) -> Lookahead | None:
    """Return None for a runner whose steps come one after the other."""
    if not runner.looks_ahead:
        return None
    return Lookahead(runner, sequences, intake, recorder, clock)
