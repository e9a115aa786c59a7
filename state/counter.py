"""Levels in Redis that several processes count together: a change concerns several keys, all of them or none.

A level is what was taken and has not come back. It may leak, so much in a millisecond, or stay until it is given back.
What a holder has taken of levels that do not leak is noted, so that others can give it back when the holder is gone.
A script that was changed has another digest, by which Redis knows it, so processes of two versions may share a Redis.
"""

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha1
from time import monotonic, time
from typing import Any, NamedTuple

import msgspec

from sluice.state.outage import Outage
from sluice.state.redis import CommandBatcher, RedisClient

_SCRIPT = """
local command, prefix, holder, now, since, parts = unpack(cmsgpack.unpack(ARGV[1]))
local holders = prefix .. 'holders'
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function held_by(name) return prefix .. 'held:' .. name end

local function write(key, level, at, ...) redis.call('SET', key, string.format('%.0f %.0f', level, at), ...) end

local function read(value) return string.match(value or '0 0', '(%S+) (%S+)') end

local function give_back(name)
  local held = redis.call('HGETALL', held_by(name))
  for i = 1, #held, 2 do
    local value = redis.call('GET', held[i])
    if value then
      local level, at = read(value)
      write(held[i], level - held[i + 1], at, 'KEEPTTL')
    end
  end
  redis.call('DEL', held_by(name))
  redis.call('ZREM', holders, name)
end

if command == 'leave' then return give_back(holder) end

-- beat: the holder lives; those that have not said so for a lifetime (`since`) are gone. The number of holders.
if command == 'beat' then
  local before = tonumber(redis.call('ZSCORE', holders, holder)) or 0
  redis.call('ZADD', holders, string.format('%.0f', now), holder)
  -- After an outage of Redis all holders look gone until they come back: one that was away itself judges none.
  if now - before <= since / 2 then
    local least = '(' .. string.format('%.0f', now - since)
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', least)) do give_back(gone) end
  end
  return redis.call('ZCARD', holders)
end

-- take, settle, add: the time, whether all has happened, and the levels. They were taken at the time `since`.
local keys, levels, fits = {}, {}, 1
for i, part in ipairs(parts) do keys[i] = prefix .. part[1] end
for i, value in ipairs(redis.call('MGET', unpack(keys))) do
  local _, amount, _, most, leak = unpack(parts[i])
  local level, at = read(value)
  level = tonumber(level)
  if leak > 0 then level = math.max(0, level - leak * math.max(0, now - at)) end
  if command == 'take' and amount > 0 and most >= 0 and level + amount > most then fits = 0 end
  levels[i] = level
end
for i, part in ipairs(fits == 1 and parts or {}) do
  local _, amount, held, most, leak, lifetime = unpack(part)
  if leak > 0 then
    -- No more comes back than what would not have leaked out since: else holders would save up for a burst.
    levels[i] = math.max(0, levels[i] + amount - math.min(held, amount + math.max(0, most - leak * (now - since))))
    if command == 'add' then levels[i] = math.min(most, levels[i]) end
  elseif amount ~= 0 or held ~= 0 then
    -- Where others took the holder for gone, they have given back what it held.
    local noted = tonumber(redis.call('HGET', held_by(holder), keys[i])) or 0
    if noted < held then held = 0 end
    levels[i] = levels[i] + amount - held
    local change = (command == 'take' and amount or 0) - held
    if noted + change == 0 then redis.call('HDEL', held_by(holder), keys[i])
    elseif change ~= 0 then redis.call('HSET', held_by(holder), keys[i], string.format('%.0f', noted + change)) end
  end
  if amount ~= 0 or held ~= 0 then write(keys[i], levels[i], now, 'PX', lifetime) end
  if command == 'take' and amount > 0 then redis.call('PEXPIRE', held_by(holder), lifetime) end
end
return {now, fits, unpack(levels)}
"""
_DIGEST = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_encode = msgspec.msgpack.Encoder().encode
_WIDTH = 4
"""Batches in flight at once."""


class LevelChange(NamedTuple):
    """A change of one level: `amount` is added in place of what was `held`.

    A level may be at most `most`, -1 for any; `leak` comes back in a millisecond. The key is forgotten `lifetime_ms`
    after its last change.
    """

    key: str
    amount: int
    held: int
    most: int
    leak: int
    lifetime_ms: int


class Counted(NamedTuple):
    """The time, in milliseconds since 1970, whether a change has happened, and the levels of its keys after it."""

    now: int
    has_happened: bool
    levels: list[int]


class RedisCounter:
    """Changes levels. Belongs to the event loop, and is to be made on it. An answer None: Redis is away."""

    def __init__(
        self,
        client: RedisClient,
        outage: Outage,
        prefix: str,
        *,
        timeout_s: float,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """All keys begin with `prefix`. A change waits at most `timeout_s` until it is sent. `clock` None: Redis'."""
        self._client = client
        self._outage = outage
        self._prefix = prefix
        self._clock = clock
        self._ahead_ms = (time() - monotonic()) * 1000
        """Milliseconds by which Redis' clock is ahead of the monotonic one here."""
        self._batcher: CommandBatcher[bytes, Counted | None] = CommandBatcher(
            self._send, None, outage, max_wait_s=timeout_s, width=_WIDTH
        )

    def now(self) -> int:
        """Return about the time by which changes are made."""
        return int(monotonic() * 1000 + self._ahead_ms) if self._clock is None else self._clock()

    def take(self, holder: str, parts: Sequence[LevelChange]) -> "asyncio.Future[Counted | None]":
        """Add all amounts for a holder, or none where a level would be more than its most."""
        return self._change("take", holder, 0, parts)

    def settle(self, holder: str, taken_at: int, parts: Sequence[LevelChange]) -> "asyncio.Future[Counted | None]":
        """Replace what a holder took at a time by the amounts, whatever the levels."""
        return self._change("settle", holder, taken_at, parts)

    def add(self, parts: Sequence[LevelChange]) -> "asyncio.Future[Counted | None]":
        """Add amounts without a holder. Leaking levels rise no higher than their bound."""
        return self._change("add", "", 0, parts)

    def _change(
        self, command: str, holder: str, taken_at: int, parts: Sequence[LevelChange]
    ) -> "asyncio.Future[Counted | None]":
        return self._batcher.put(_encode((command, self._prefix, holder, self._time(), taken_at, parts)))

    async def _send(self, changes: list[bytes]) -> list[Counted | None]:
        pipeline = self._client.pipeline(transaction=False)
        for change in changes:
            pipeline.evalsha(_DIGEST, 0, change)
        replies = await pipeline.execute(raise_on_error=False)
        failure = next((each for each in replies if isinstance(each, Exception)), None)
        if failure is not None:
            self._outage.failed(failure)
        return [None if isinstance(each, Exception) else self._read(each) for each in replies]

    def _read(self, reply: list[int]) -> Counted:
        now, has_happened, *levels = reply
        self._ahead_ms = now - monotonic() * 1000
        return Counted(now, bool(has_happened), levels)

    async def load(self) -> None:
        """Load the script, which Redis forgets when it ends."""
        await self._client.script_load(_SCRIPT)

    async def beat(self, holder: str, lifetime_ms: int) -> int:
        """Renew a holder's lease, and release the levels of holders whose lease has expired. Return the number that
        live."""
        return int(await self._run("beat", holder, lifetime_ms))

    async def leave(self, holder: str) -> None:
        """Give back what a holder holds, which is gone."""
        await self._run("leave", holder, 0)

    async def _run(self, command: str, holder: str, since: int) -> Any:
        return await self._client.evalsha(_DIGEST, 0, _encode((command, self._prefix, holder, self._time(), since)))

    def _time(self) -> int:
        """Return the time of a command; 0: Redis' own."""
        return 0 if self._clock is None else self._clock()

    async def close(self) -> None:
        """Answer everything that waits with None. Redis is away already."""
        await self._batcher.close()
