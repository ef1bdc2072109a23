-- Delete a session's binding and say so, bound or not: a worker may hold KV of a session whose binding is gone.
-- KEYS: session   ARGV: channel, event
-- Returns the binding's text, or nil.
local holding = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[1], ARGV[2])
return holding
