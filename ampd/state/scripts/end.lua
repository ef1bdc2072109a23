-- Delete a session's binding and publish the event, even without a binding, because a worker may still hold its KV.
-- The caller may not know the tenant, because only the coordinator that served the session does.
-- The end is kept for a while, for workers that are away.
-- KEYS: session, live sessions of the graph, live sessions of the tenant that the caller knows, tenant of the session,
--   ended sessions
-- ARGV: channel, event, session id, beginning of the keys with the live sessions of a tenant, ms for which the end is kept
-- Returns the binding's text, or nil.
local holding = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[3])
local tenant = redis.call('GET', KEYS[4])
if tenant then
  redis.call('ZREM', ARGV[4] .. tenant, ARGV[3])
  redis.call('DEL', KEYS[4])
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local keep_ms = tonumber(ARGV[5])
redis.call('ZADD', KEYS[5], string.format('%.0f', now_ms), ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', now_ms - keep_ms))
redis.call('PEXPIRE', KEYS[5], keep_ms)
redis.call('PUBLISH', ARGV[1], ARGV[2])
return holding
