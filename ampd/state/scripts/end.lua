-- Delete a session's binding and publish the event, even without a binding, because a worker may still hold its KV.
-- KEYS: session   ARGV: channel, event
-- Returns the binding's text, or nil.
local holding = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[1], ARGV[2])
return holding
