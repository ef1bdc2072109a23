-- Remove a worker and publish the event.
-- KEYS: workers, worker, queue   ARGV: worker id, channel
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('PUBLISH', ARGV[2], cjson.encode({'WorkerRemoved', ARGV[1]}))
