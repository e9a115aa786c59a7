"""The watchdog, which ends an engine whose runtime is ill or hangs, and the token that proves that one works."""

import asyncio
from collections.abc import Callable, Mapping

from sluice.engine.delegated.in_flight import InFlightTable
from sluice.engine.delegated.interface import DelegatedRuntime, EngineLost
from sluice.engine.runtime_settings import STALL_SETTING
from sluice.engine.types import EngineInfo, FinishReason, GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError, invalid

STALL_TIMEOUT_S = 60.0
"""Longer than any step takes, the first one of a new shape included."""
CHECK_S = 0.25
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""The end of sequence is ignored so that the token ends by its length."""


def stall_timeout_s(settings: Mapping[str, str]) -> float:
    """Return the timeout that `runtime_settings` have. Raises SluiceError INVALID."""
    text = settings.get(STALL_SETTING, "")
    try:
        value = float(text) if text else STALL_TIMEOUT_S
    except ValueError:
        value = 0.0
    if not value > 0:
        raise invalid(STALL_SETTING, f"{STALL_SETTING} must be a number of seconds above 0, got {text!r}")
    return value


class Watchdog:
    """Ends the engine where the runtime is ill or stalls: `run` raises EngineLost."""

    def __init__(
        self,
        runtime: DelegatedRuntime,
        info: EngineInfo,
        in_flight: InFlightTable,
        has_iterations: Callable[[float], bool],
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        """`has_iterations` says whether the runtime tells of iterations at a time; `timeout_s` is that of a stall."""
        self._runtime = runtime
        self._info = info
        self._in_flight = in_flight
        self._has_iterations = has_iterations
        self._clock = clock
        self._timeout_s = timeout_s
        self._last_progress = clock()
        self.is_paused = False
        """Whether nothing can come, as the runtime sleeps."""
        self._probe: asyncio.Task[None] | None = None

    def note_progress(self) -> None:
        """A response or an iteration came, or the first request came to an idle engine."""
        self._last_progress = self._clock()

    async def run(self) -> None:
        """Watch until cancelled. Raises EngineLost."""
        try:
            while True:
                if not await self._runtime.is_healthy():
                    raise EngineLost(f"{self._runtime.title} says that it is not healthy")
                if self.is_paused:
                    await self._end_probe()
                    self.note_progress()
                else:
                    self._check_probe()
                    self._check_progress()
                await asyncio.sleep(CHECK_S)
        finally:
            await self._end_probe()

    async def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
            self._probe = None

    def _check_probe(self) -> None:
        """Prove that the runtime still generates where an aborted request did not end."""
        if self._probe is not None and self._probe.done():
            probe, self._probe = self._probe, None
            probe.result()
        if self._in_flight.drop_unended(self._clock()) and self._probe is None:
            self._probe = asyncio.create_task(self._prove(), name="probe")

    async def _prove(self) -> None:
        """Generate a token in the time that no token may take. Raises EngineLost."""
        try:
            await generate_one_token(self._runtime, self._info, "probe", self._timeout_s)
        except TimeoutError:
            reason = f"an aborted request did not end, and no token came in {STALL_SETTING}"
            raise EngineLost(f"{self._runtime.title} cannot go on: {reason}") from None
        except Exception as error:
            raise EngineLost(f"{self._runtime.title} cannot go on: {error}") from error

    def _check_progress(self) -> None:
        now = self._clock()
        silent_s = now - self._last_progress
        if silent_s <= self._timeout_s:
            return
        has_iterations = self._has_iterations(now)
        for each in self._in_flight.sequences:
            # A beam search shows only iterations before its end.
            if not each.is_answered and (has_iterations or each.request.sampling.beam_width == 1):
                nothing = f"no token and run no iteration for {silent_s:.1f} s ({STALL_SETTING})"
                raise EngineLost(f"{self._runtime.title} has brought {nothing}")


async def warm_up(runtime: DelegatedRuntime, info: EngineInfo, limit_s: float) -> None:
    """Generate a token to prove that a model works. Raises SluiceError without one in `limit_s`, or if not healthy."""
    loaded = f"{runtime.title} loaded the model, but"
    try:
        reason = await generate_one_token(runtime, info, "warm-up", limit_s)
    except TimeoutError:
        raise SluiceError(ErrorCode.INTERNAL, f"{loaded} brings no token within {limit_s:g} s") from None
    if reason not in (FinishReason.LENGTH, FinishReason.STOP):
        raise SluiceError(ErrorCode.INTERNAL, f"{loaded} it brings no token")
    if not await runtime.is_healthy():
        raise SluiceError(ErrorCode.INTERNAL, f"{loaded} says that it is not healthy")


async def generate_one_token(
    runtime: DelegatedRuntime,
    info: EngineInfo,
    request_id: str,
    limit_s: float,
    params: SamplingParams = ONE_TOKEN,
) -> FinishReason | None:
    """Generate a token, and return why it ended. Raises TimeoutError after `limit_s`, and what `runtime` raises."""
    # A prompt of this token alone cannot be found in the cache by any other.
    token_id = info.eos_token_ids[0] if info.eos_token_ids else 0
    request = GenerateRequest(request_id=request_id, prompt_token_ids=[token_id], sampling=params)
    reason = None
    async with asyncio.timeout(limit_s):
        handle = runtime.submit(runtime.prepare(request))
        async for response in handle:
            reason = handle.read(response).finish_reason or reason
    return reason
