# redis-cli exits with 0 on an error reply, too, so its answer is compared. It takes the password from REDISCLI_AUTH.
# REDIS_CLI_ARGS is set by components/redis-tls and split into words here.
# shellcheck disable=SC2086
REDISCLI_AUTH=$REDIS_PASSWORD redis-cli -h 127.0.0.1 -p 6379 --user ampd ${REDIS_CLI_ARGS:-} ping | grep -qx PONG
