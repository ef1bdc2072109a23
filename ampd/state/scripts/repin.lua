-- Move a session to another decode worker unless a binding holds that is newer than the caller's, or as new and another.
-- A repeated call changes nothing.
-- KEYS: session   ARGV: old worker id, old epoch, new worker id, session TTL ms
-- Returns {1 if accepted, epoch, worker id} of the binding that holds.
local holding = redis.call('GET', KEYS[1])
local old = ARGV[2] .. ' ' .. ARGV[1]
local new_epoch = string.format('%.0f', tonumber(ARGV[2]) + 1)
local new = new_epoch .. ' ' .. ARGV[3]
if holding and holding ~= old and holding ~= new then
  local space = string.find(holding, ' ', 1, true)
  local bound_epoch = tonumber(string.sub(holding, 1, space - 1))
  if bound_epoch >= tonumber(ARGV[2]) then
    return {0, bound_epoch, string.sub(holding, space + 1)}
  end
end
redis.call('SET', KEYS[1], new, 'PX', ARGV[4])
return {1, tonumber(new_epoch), ARGV[3]}
