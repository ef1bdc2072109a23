-- Delete a session's binding and publish the event, even without a binding, because a worker may still hold its KV.
-- The caller may not know the tenant, because only the coordinator that served the session does.
-- The end is kept for a while, for workers that are away.
-- A worker that tells the end late must not end the next life of the session, which another worker owns. A binding that
-- is older than the worker's ends: a coordinator moved the session while Redis was away.
-- KEYS: session, live sessions of the graph, live sessions of the tenant that the caller knows, tenant of the session,
--   ended sessions
-- ARGV: channel, session id, beginning of the keys with the live sessions of a tenant, ms for which the end is kept,
--   the worker that tells the end ('': none does), epoch of its binding (0: it is not known)
-- Returns the binding's text, or nil.
local holding = redis.call('GET', KEYS[1])
if holding and ARGV[5] ~= '' then
  local space, epoch = string.find(holding, ' ', 1, true), tonumber(ARGV[6])
  local bound_epoch = tonumber(string.sub(holding, 1, space - 1))
  local holds = string.sub(holding, space + 1) == ARGV[5] and (epoch == 0 or epoch == bound_epoch)
  if not holds and epoch <= bound_epoch then
    return holding
  end
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[3], ARGV[2])
local tenant = redis.call('GET', KEYS[4])
if tenant then
  redis.call('ZREM', ARGV[3] .. tenant, ARGV[2])
  redis.call('DEL', KEYS[4])
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local keep_ms = tonumber(ARGV[4])
redis.call('ZADD', KEYS[5], string.format('%.0f', now_ms), ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', now_ms - keep_ms))
redis.call('PEXPIRE', KEYS[5], keep_ms)
redis.call('PUBLISH', ARGV[1], cjson.encode({'SessionEnded', ARGV[2]}))
return holding
