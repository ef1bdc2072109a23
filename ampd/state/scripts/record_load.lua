-- Add a batch of ended rounds to the recent load, and remove the batches that are too old.
-- KEYS: load   ARGV: batch, ms for which it is kept
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local keep = tonumber(ARGV[2])
local written = string.format('%.0f', now)
redis.call('ZADD', KEYS[1], written, written .. ' ' .. ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - keep))
redis.call('PEXPIRE', KEYS[1], keep)
