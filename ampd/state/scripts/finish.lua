-- Remove prefills from a live worker's queue and publish their ends. A removal is kept for a while, because a view that
-- was written before the prefill finished may still arrive.
-- KEYS: worker, queue   ARGV: channel, queue TTL ms, worker id, task id ...
local time = redis.call('TIME')
local removal = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)) .. ' '
local is_live = redis.call('EXISTS', KEYS[1]) == 1
for i = 4, #ARGV do
  if is_live then
    redis.call('HSET', KEYS[2], ARGV[i], removal)
  else
    redis.call('HDEL', KEYS[2], ARGV[i])
  end
  redis.call('PUBLISH', ARGV[1], cjson.encode({'TaskDone', ARGV[3], ARGV[i]}))
end
if is_live then
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
