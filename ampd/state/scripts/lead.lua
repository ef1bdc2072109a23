-- Take or renew the lead, unless another coordinator has it.
-- KEYS: leader, assigned   ARGV: holder, lease ms
-- Returns {1 if it leads, ms since a role was last assigned or -1}.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return {0, -1}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local assigned = redis.call('GET', KEYS[2])
if not assigned then
  return {1, -1}
end
local time = redis.call('TIME')
return {1, math.max(0, time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(assigned))}
