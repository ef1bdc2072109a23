-- Note that a worker died while it ran a prompt. From the second death on, refuse the prompt for a time that grows.
-- KEYS: deaths, refused   ARGV: death, ms for which deaths are counted, deaths from which on the prompt is refused,
--   ms of the first refusal
-- Returns the number of deaths.
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local deaths = redis.call('SCARD', KEYS[1])
if deaths >= tonumber(ARGV[3]) then
  local refused_ms = math.min(tonumber(ARGV[4]) * 4 ^ (deaths - tonumber(ARGV[3])), tonumber(ARGV[2]) / 2)
  redis.call('SET', KEYS[2], deaths, 'PX', string.format('%.0f', refused_ms))
end
return deaths
