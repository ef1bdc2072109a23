-- Claim or refresh a session's binding, enter the prefill in a worker's queue and publish the event; or change nothing.
-- KEYS: session, queue   ARGV: worker id, epoch (0: believed to be new), session TTL ms, task id, task, channel, event,
--   queue TTL ms
-- Returns {1 if accepted, epoch, worker id} of the binding that holds.
local holding = redis.call('GET', KEYS[1])
local epoch = tonumber(ARGV[2])
if holding then
  local space = string.find(holding, ' ', 1, true)
  local bound_epoch = tonumber(string.sub(holding, 1, space - 1))
  local bound_worker = string.sub(holding, space + 1)
  if bound_worker ~= ARGV[1] or (epoch ~= 0 and epoch ~= bound_epoch) then
    return {0, bound_epoch, bound_worker}
  end
  epoch = bound_epoch
elseif epoch == 0 then
  epoch = 1
end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[1], string.format('%.0f', epoch) .. ' ' .. ARGV[1], 'PX', ARGV[3])
redis.call('HSET', KEYS[2], ARGV[4], now .. ' ' .. ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
redis.call('PUBLISH', ARGV[6], ARGV[7])
return {1, epoch, ARGV[1]}
