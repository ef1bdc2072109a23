-- Write a coordinator's view, renew its lease, and remove those whose lease expired from the index.
-- KEYS: coordinators, coordinator   ARGV: coordinator id, lease ms, view, ms that the index outlives a lease
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = tonumber(ARGV[2])
redis.call('SET', KEYS[2], string.format('%.0f', now) .. ' ' .. ARGV[3], 'PX', lease)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + lease), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
local index_ttl = lease + tonumber(ARGV[4])
if redis.call('PTTL', KEYS[1]) < index_ttl then
  redis.call('PEXPIRE', KEYS[1], index_ttl)
end
