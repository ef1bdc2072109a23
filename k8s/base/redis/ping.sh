# redis-cli exits with 0 on an error reply, too, and takes the password from REDISCLI_AUTH.
REDISCLI_AUTH=$REDIS_PASSWORD redis-cli -h 127.0.0.1 -p 6379 --user ampd ping | grep -qx PONG
