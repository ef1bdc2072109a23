-- Remove a prefill from a live worker's queue and publish the event. The removal is kept for a while, because a view
-- that was written before the prefill finished may still arrive.
-- KEYS: worker, queue   ARGV: task id, channel, event, queue TTL ms
if redis.call('EXISTS', KEYS[1]) == 1 then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)) .. ' ')
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
else
  redis.call('HDEL', KEYS[2], ARGV[1])
end
redis.call('PUBLISH', ARGV[2], ARGV[3])
