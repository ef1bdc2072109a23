-- Everything about the live workers at one moment. Read only.
-- KEYS: workers   ARGV: key prefix
-- Returns {now ms, {view, queue changes}, ...}.
local time = redis.call('TIME')
local answer = {time[1] * 1000 + math.floor(time[2] / 1000)}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local view = redis.call('GET', ARGV[1] .. 'worker:' .. id)
  if view then
    answer[#answer + 1] = {view, redis.call('HGETALL', ARGV[1] .. 'queue:' .. id)}
  end
end
return answer
