-- Delete a session's binding and publish the event, even without a binding, because a worker may still hold its KV.
-- The caller may not know the tenant, because only the coordinator that served the session does.
-- KEYS: session, live sessions of the graph, live sessions of the tenant that the caller knows, tenant of the session
-- ARGV: channel, session id, beginning of the keys with the live sessions of a tenant
-- Returns the binding's text, or nil.
local holding = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[3], ARGV[2])
local tenant = redis.call('GET', KEYS[4])
if tenant then
  redis.call('ZREM', ARGV[3] .. tenant, ARGV[2])
  redis.call('DEL', KEYS[4])
end
redis.call('PUBLISH', ARGV[1], cjson.encode({'SessionEnded', ARGV[2]}))
return holding
