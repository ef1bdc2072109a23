-- Write or refresh a session's binding, enter the prefill in a worker's queue and publish the event; or change nothing.
-- A binding with a higher epoch replaces the one that is stored: a coordinator moved the session while Redis was away.
-- KEYS: session, queue, live sessions of the graph, live sessions of the tenant, tenant of the session, whether the
--   prompt is refused, coordinator that had the request last
-- ARGV: worker id, epoch (0: believed to be new), session TTL ms, task id ('': none is entered), task, channel, worker of the queue, queue TTL ms,
--   session id, session TTL ms until the second round, most sessions of the graph (0: any number), of the tenant,
--   name of the tenant in live sessions ('': that of sessions without a tenant), TTL ms of the binding if the round ends
--   its session ('': it does not), coordinator ('': the request has no id), TTL ms of its name
-- Returns {1 if accepted, epoch, worker id} of the binding that holds; {-1, 0, ''} or {-2, 0, ''} if the session is new
-- and the graph or the tenant has its most sessions; {-3, deaths, ''} if workers died under the prompt;
-- {-4, 0, ''} if another coordinator had the request before.
local deaths = redis.call('GET', KEYS[6])
if deaths then
  return {-3, tonumber(deaths), ''}
end
if ARGV[15] ~= '' then
  local asker = redis.call('GET', KEYS[7])
  redis.call('SET', KEYS[7], ARGV[15], 'PX', ARGV[16])
  if asker and asker ~= ARGV[15] then
    return {-4, 0, ''}
  end
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local now = string.format('%.0f', now_ms)
local holding = redis.call('GET', KEYS[1])
local epoch = tonumber(ARGV[2])
local ttl = ARGV[3]
if holding then
  local space = string.find(holding, ' ', 1, true)
  local bound_epoch = tonumber(string.sub(holding, 1, space - 1))
  local bound_worker = string.sub(holding, space + 1)
  local holds = bound_worker == ARGV[1] and (epoch == 0 or epoch == bound_epoch)
  if not holds and epoch <= bound_epoch then
    return {0, bound_epoch, bound_worker}
  end
  epoch = math.max(epoch, bound_epoch)
elseif epoch == 0 then
  -- What ends later than a session can live is from before the clock went back. It would count until then.
  local latest = string.format('%.0f', now_ms + tonumber(ARGV[3]))
  for i = 3, 4 do
    local most = tonumber(ARGV[i + 8])
    if most > 0 and redis.call('ZCOUNT', KEYS[i], '(' .. now, latest) >= most then
      return {2 - i, 0, ''}
    end
  end
  epoch = 1
  ttl = ARGV[10]
end
if ARGV[14] ~= '' then
  ttl = ARGV[14]
end
-- The first write must be one that needs memory, because a full Redis refuses a script at its first write only.
redis.call('SET', KEYS[1], string.format('%.0f', epoch) .. ' ' .. ARGV[1], 'PX', ttl)
for i = 3, 4 do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
  redis.call('ZADD', KEYS[i], string.format('%.0f', now_ms + tonumber(ttl)), ARGV[9])
  redis.call('PEXPIREAT', KEYS[i], redis.call('ZRANGE', KEYS[i], -1, -1, 'WITHSCORES')[2])
end
if ARGV[13] ~= '' then
  redis.call('SET', KEYS[5], ARGV[13], 'PX', ttl)
end
-- A write that its coordinator gave up waiting for may come after the worker's removal of the prefill.
local queued = ARGV[4] == '' and ' ' or redis.call('HGET', KEYS[2], ARGV[4])
if not queued or string.sub(queued, -1) ~= ' ' then
  redis.call('HSET', KEYS[2], ARGV[4], now .. ' ' .. ARGV[5])
  redis.call('PEXPIRE', KEYS[2], ARGV[8])
  redis.call('PUBLISH', ARGV[6], '["TaskQueued",' .. cjson.encode(ARGV[7]) .. ',' .. ARGV[5] .. ']')
end
return {1, epoch, ARGV[1]}
