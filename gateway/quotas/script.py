"""The arithmetic of `account.py` in Lua: Redis runs it at once for all parties of a request, by its own clock.

A party has a hash: levels of its buckets and their time (request_level, token_level, at), day and month with what was
used in them, and open streams. What each gateway holds of it is in a hash of its own, so that the others can give it
back when the gateway is gone. All numbers are whole ones below 2^53. A script that was changed has another digest, by
which Redis knows it, so gateways of two versions may share a Redis.
"""

SCRIPT = """
local MINUTE, DAY = 60000, 86400000
local MONTH_TTL = 40 * DAY
local FIELDS = {'request_level', 'token_level', 'at', 'day', 'day_tokens', 'month', 'month_tokens', 'month_money',
  'num_streams'}
local HELD = {'day', 'day_tokens', 'month', 'month_tokens', 'month_money', 'num_streams'}
local PREFIX = 'sluice:quota:'
local GATEWAYS = PREFIX .. 'gateways'

local function read(key, fields)
  local values, found = redis.call('HMGET', key, unpack(fields)), {}
  for i, name in ipairs(fields) do found[name] = tonumber(values[i]) or 0 end
  return found
end

local function write(key, fields, record)
  local values = {}
  for _, name in ipairs(fields) do
    values[#values + 1] = name
    values[#values + 1] = string.format('%.0f', record[name])
  end
  redis.call('HSET', key, unpack(values))
  redis.call('PEXPIRE', key, MONTH_TTL)
end

local function month_of(day)
  -- Days to months by eras of 400 years that begin in March.
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local from_march = math.floor((5 * doy + 2) / 153)
  return (yoe + era * 400) * 12 + from_march + 2
end

local function advance(account, rpm, tpm, now)
  local passed = math.max(0, now - account.at)
  account.at = now
  if rpm < 0 then rpm = 1e11 end
  if tpm < 0 then tpm = 1e11 end
  account.request_level = math.max(0, account.request_level - passed * rpm)
  account.token_level = math.max(0, account.token_level - passed * tpm)
  local day = math.floor(now / DAY)
  if day ~= account.day then
    account.day, account.day_tokens = day, 0
    local month = month_of(day)
    if month ~= account.month then
      account.month, account.month_tokens, account.month_money = month, 0, 0
    end
  end
end

local function within(limit, used) return limit < 0 or used <= limit end

local function hold(gateway, party, account, tokens, money, streams)
  local key = PREFIX .. 'held:' .. gateway .. ':' .. party
  local held = read(key, HELD)
  if held.day ~= account.day then held.day, held.day_tokens = account.day, 0 end
  if held.month ~= account.month then held.month, held.month_tokens, held.month_money = account.month, 0, 0 end
  held.day_tokens = held.day_tokens + tokens
  held.month_tokens = held.month_tokens + tokens
  held.month_money = held.month_money + money
  held.num_streams = held.num_streams + streams
  write(key, HELD, held)
  redis.call('SADD', PREFIX .. 'held:' .. gateway, party)
end

local function clock(given)
  if given ~= '0' then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local calls = {}

-- gateway now requests tokens money streams; party rpm tpm day month money streams ...
function calls.reserve(args)
  local gateway, now = args[2], clock(args[3])
  local requests, tokens, money, streams = tonumber(args[4]), tonumber(args[5]), tonumber(args[6]), tonumber(args[7])
  local parties, fits, reply = {}, true, {}
  for i = 8, #args, 7 do
    local name = args[i]
    local limit = {}
    for j = 1, 6 do limit[j] = tonumber(args[i + j]) end
    local account = read(PREFIX .. name, FIELDS)
    advance(account, limit[1], limit[2], now)
    fits = fits
      and (requests == 0 or limit[1] < 0 or account.request_level + requests * MINUTE <= limit[1] * MINUTE)
      and (tokens == 0 or limit[2] < 0 or account.token_level + tokens * MINUTE <= limit[2] * MINUTE)
      and (tokens == 0 or within(limit[3], account.day_tokens + tokens))
      and (tokens == 0 or within(limit[4], account.month_tokens + tokens))
      and (money == 0 or within(limit[5], account.month_money + money))
      and (streams == 0 or within(limit[6], account.num_streams + streams))
    parties[#parties + 1] = {name = name, account = account, rpm = limit[1], tpm = limit[2]}
  end
  reply[1] = fits and 1 or 0
  for _, party in ipairs(parties) do
    local account = party.account
    if fits then
      if party.rpm >= 0 then account.request_level = account.request_level + requests * MINUTE end
      if party.tpm >= 0 then account.token_level = account.token_level + tokens * MINUTE end
      account.day_tokens = account.day_tokens + tokens
      account.month_tokens = account.month_tokens + tokens
      account.month_money = account.month_money + money
      account.num_streams = account.num_streams + streams
      write(PREFIX .. party.name, FIELDS, account)
      hold(gateway, party.name, account, tokens, money, streams)
    end
    for _, field in ipairs(FIELDS) do reply[#reply + 1] = account[field] end
  end
  return reply
end

-- gateway now at day month held_tokens held_money money streams; party rpm tpm tokens ...
function calls.settle(args)
  local gateway, now, at = args[2], clock(args[3]), tonumber(args[4])
  local day, month = tonumber(args[5]), tonumber(args[6])
  local held_tokens, held_money, money = tonumber(args[7]), tonumber(args[8]), tonumber(args[9])
  for i = 11, #args, 4 do
    local name, rpm, tpm, tokens = args[i], tonumber(args[i + 1]), tonumber(args[i + 2]), tonumber(args[i + 3])
    local account = read(PREFIX .. name, FIELDS)
    advance(account, rpm, tpm, now)
    local key = PREFIX .. 'held:' .. gateway .. ':' .. name
    local held = read(key, HELD)
    local unused = held_tokens - tokens
    if tpm >= 0 then
      local most = math.max(0, (MINUTE - (now - at)) * tpm)
      account.token_level = math.max(0, account.token_level - math.min(unused * MINUTE, most))
    end
    -- Where others took the gateway for gone, they have given back what it held: then only what was used is added.
    if account.day == day then
      local is_held = held.day == day and held.day_tokens >= held_tokens
      account.day_tokens = account.day_tokens + tokens - (is_held and held_tokens or 0)
      if is_held then held.day_tokens = held.day_tokens - held_tokens end
    end
    if account.month == month then
      local is_held = held.month == month and held.month_tokens >= held_tokens and held.month_money >= held_money
      account.month_tokens = account.month_tokens + tokens - (is_held and held_tokens or 0)
      account.month_money = account.month_money + money - (is_held and held_money or 0)
      if is_held then
        held.month_tokens = held.month_tokens - held_tokens
        held.month_money = held.month_money - held_money
      end
    end
    local streams = math.min(tonumber(args[10]), held.num_streams)
    account.num_streams = account.num_streams - streams
    held.num_streams = held.num_streams - streams
    write(PREFIX .. name, FIELDS, account)
    if held.num_streams == 0 and held.day_tokens == 0 and held.month_tokens == 0 and held.month_money == 0 then
      redis.call('DEL', key)
      redis.call('SREM', PREFIX .. 'held:' .. gateway, name)
    else
      write(key, HELD, held)
    end
  end
  return 1
end

-- now; party rpm tpm request_level token_level day day_tokens month month_tokens month_money
function calls.add(args)
  local now, name, rpm, tpm = clock(args[2]), args[3], tonumber(args[4]), tonumber(args[5])
  local account = read(PREFIX .. name, FIELDS)
  advance(account, rpm, tpm, now)
  if rpm >= 0 then account.request_level = math.min(rpm * MINUTE, account.request_level + tonumber(args[6])) end
  if tpm >= 0 then account.token_level = math.min(tpm * MINUTE, account.token_level + tonumber(args[7])) end
  if account.day == tonumber(args[8]) then account.day_tokens = account.day_tokens + tonumber(args[9]) end
  if account.month == tonumber(args[10]) then
    account.month_tokens = account.month_tokens + tonumber(args[11])
    account.month_money = account.month_money + tonumber(args[12])
  end
  write(PREFIX .. name, FIELDS, account)
  return 1
end

local function give_back(gateway)
  for _, name in ipairs(redis.call('SMEMBERS', PREFIX .. 'held:' .. gateway)) do
    local key = PREFIX .. 'held:' .. gateway .. ':' .. name
    local held, account = read(key, HELD), read(PREFIX .. name, FIELDS)
    if account.day == held.day then account.day_tokens = account.day_tokens - held.day_tokens end
    if account.month == held.month then
      account.month_tokens = account.month_tokens - held.month_tokens
      account.month_money = account.month_money - held.month_money
    end
    account.num_streams = account.num_streams - held.num_streams
    write(PREFIX .. name, FIELDS, account)
    redis.call('DEL', key)
  end
  redis.call('DEL', PREFIX .. 'held:' .. gateway)
  redis.call('ZREM', GATEWAYS, gateway)
end

-- gateway now lifetime: the gateway lives; those that have not said so for its lifetime are gone.
function calls.beat(args)
  local gateway, now, lifetime = args[2], clock(args[3]), tonumber(args[4])
  local before = tonumber(redis.call('ZSCORE', GATEWAYS, gateway)) or 0
  redis.call('ZADD', GATEWAYS, string.format('%.0f', now), gateway)
  -- After an outage of Redis all gateways look gone until they come back: one that was away itself judges none.
  if now - before <= lifetime / 2 then
    local least = string.format('%.0f', now - lifetime)
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', '(' .. least)) do give_back(gone) end
  end
  return redis.call('ZCARD', GATEWAYS)
end

function calls.leave(args)
  give_back(args[2])
  return 1
end

return calls[ARGV[1]](ARGV)
"""
