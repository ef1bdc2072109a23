-- Assign a role to a worker and publish the event, or do nothing if the caller does not lead.
-- KEYS: leader, role, assigned   ARGV: holder, role, role TTL ms, channel, TTL ms of the time of assignment
-- Returns 1 if it was assigned.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[3], now, 'PX', ARGV[5])
redis.call('PUBLISH', ARGV[4], ARGV[2])
return 1
