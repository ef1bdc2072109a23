-- Forget a worker and say so.
-- KEYS: workers, worker, queue, held   ARGV: worker id, channel, event
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
redis.call('PUBLISH', ARGV[2], ARGV[3])
