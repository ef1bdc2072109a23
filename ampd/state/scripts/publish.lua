-- Write a worker's whole view, renew its lease, note the prefills that have left its queue, and remove the workers whose
-- lease expired. What has left is noted for a while, because a coordinator's write that enters it may still come.
-- KEYS: workers, worker, queue, role   ARGV: worker id, lease ms, lease s, view, channel, queue grace ms, key prefix,
--   ms that the index outlives a lease, queue TTL ms, task ids as JSON
-- Returns the role that was assigned to the worker, or nil.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = tonumber(ARGV[2])
redis.call('SET', KEYS[2], string.format('%.0f', now) .. ' ' .. ARGV[4], 'PX', lease)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + lease), ARGV[1])
local index_ttl = lease + tonumber(ARGV[8])
if redis.call('PTTL', KEYS[1]) < index_ttl then
  redis.call('PEXPIRE', KEYS[1], index_ttl)
end
local changes = redis.call('HGETALL', KEYS[3])
for i = 1, #changes, 2 do
  local written = tonumber(string.sub(changes[i + 1], 1, string.find(changes[i + 1], ' ', 1, true) - 1))
  if now - written >= tonumber(ARGV[6]) then
    redis.call('HDEL', KEYS[3], changes[i])
  end
end
local done = cjson.decode(ARGV[10])
for _, task in ipairs(done) do
  redis.call('HSET', KEYS[3], task, string.format('%.0f', now) .. ' ')
end
if #done > 0 then
  redis.call('PEXPIRE', KEYS[3], ARGV[9])
end
redis.call('PUBLISH', ARGV[5], '["WorkerUpdated",' .. ARGV[4] .. ',' .. ARGV[3] .. ',' .. ARGV[10] .. ']')
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('DEL', ARGV[7] .. 'worker:' .. gone, ARGV[7] .. 'queue:' .. gone)
  redis.call('PUBLISH', ARGV[5], cjson.encode({'WorkerRemoved', gone, true}))
end
return redis.call('GET', KEYS[4])
