"""What gateways do to streams in Redis, each in one step that no other gateway comes between."""

from hashlib import sha1

PREFIX = "sluice:streams:"
SCRIPT = """
local prefix, command, id = 'sluice:streams:', ARGV[1], ARGV[2]
local head, items = prefix .. id .. ':head', prefix .. id .. ':items'

local function expire(head, items, ms)
    local key = redis.call('HGET', head, 'key')
    if key and key ~= '' then redis.call('PEXPIRE', key, ms) end
    redis.call('PEXPIRE', head, ms)
    redis.call('PEXPIRE', items, ms)
end

local function forget_key(head)
    local key = redis.call('HGET', head, 'key')
    if key and key ~= '' then redis.call('DEL', key) end
end

local function append(name, id, ms, ending, batch)
    local head, items = prefix .. id .. ':head', prefix .. id .. ':items'
    local runner, cancelled = unpack(redis.call('HMGET', head, 'runner', 'cancelled'))
    if not runner then return -2 end
    if cancelled then return -1 end
    if runner ~= name then return 0 end
    if batch ~= '' then redis.call('RPUSH', items, batch) end
    if ending ~= '' then redis.call('HSET', head, 'ended', ending) end
    if ending == 'broken' then forget_key(head) end
    expire(head, items, ms)
    return 1
end

-- begin ID ORIGIN RUNNER MS KEY: the id of the stream that has the key already, or nothing
if command == 'begin' then
    local key = ARGV[6]
    if key ~= '' then
        local earlier = redis.call('GET', key)
        if earlier and redis.call('EXISTS', prefix .. earlier .. ':head') == 1 then return earlier end
        redis.call('SET', key, id)
    end
    redis.call('HSET', head, 'origin', ARGV[3], 'runner', ARGV[4], 'key', key)
    expire(head, items, ARGV[5])
    return ''

-- append RUNNER, and of each stream ID MS END ITEMS, where END is '', 'whole' or 'broken'. Of each it returns 1, or 0
-- where the stream is another's, -1 where it was cancelled, -2 where it is not there
elseif command == 'append' then
    local answers = {}
    for i = 3, #ARGV, 4 do
        answers[#answers + 1] = append(ARGV[2], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    end
    return answers

-- look ID: who runs the stream, whether that gateway lives, and whether the stream has ended and was cancelled; nothing
-- where it is not there
elseif command == 'look' then
    local runner, ended, cancelled = unpack(redis.call('HMGET', head, 'runner', 'ended', 'cancelled'))
    if not runner then return {} end
    return {runner, redis.call('EXISTS', prefix .. 'gateway:' .. runner), ended and 1 or 0, cancelled and 1 or 0}

-- take ID RUNNER MS: 1 where the stream is the runner's from here on: the one before has gone
elseif command == 'take' then
    local runner = redis.call('HGET', head, 'runner')
    if not runner or redis.call('HEXISTS', head, 'ended') == 1 then return 0 end
    if redis.call('HEXISTS', head, 'cancelled') == 1 then return 0 end
    if runner ~= ARGV[3] and redis.call('EXISTS', prefix .. 'gateway:' .. runner) == 1 then return 0 end
    redis.call('HSET', head, 'runner', ARGV[3])
    expire(head, items, ARGV[4])
    return 1

-- drop ID RUNNER: delete the stream, where it is the runner's
elseif command == 'drop' then
    if redis.call('HGET', head, 'runner') ~= ARGV[3] then return 0 end
    forget_key(head)
    return redis.call('DEL', head, items)

-- cancel ID: delete the stream, and tell its runner
elseif command == 'cancel' and redis.call('EXISTS', head) == 1 then
    forget_key(head)
    redis.call('DEL', items)
    redis.call('HDEL', head, 'origin')
    redis.call('HSET', head, 'cancelled', 1)
end
"""
DIGEST = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Redis' name of the script."""
