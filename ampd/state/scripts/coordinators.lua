-- The views of the live coordinators. Read only.
-- KEYS: coordinators   ARGV: key prefix
-- Returns {now ms, view, ...}.
local time = redis.call('TIME')
local answer = {time[1] * 1000 + math.floor(time[2] / 1000)}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local view = redis.call('GET', ARGV[1] .. 'coordinator:' .. id)
  if view then
    answer[#answer + 1] = view
  end
end
return answer
