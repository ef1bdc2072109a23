-- The recent load. Read only.
-- KEYS: load
-- Returns {now ms, batch, ...}, the oldest batch first.
local time = redis.call('TIME')
local answer = {time[1] * 1000 + math.floor(time[2] / 1000)}
for _, batch in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  answer[#answer + 1] = batch
end
return answer
