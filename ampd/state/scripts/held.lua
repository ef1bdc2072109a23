-- A live worker's word on one session, which holds until its next view.
-- KEYS: worker, held   ARGV: session id, tokens, channel, event
local lease = redis.call('PTTL', KEYS[1])
if lease > 0 then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], lease)
end
redis.call('PUBLISH', ARGV[3], ARGV[4])
