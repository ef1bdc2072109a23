# Puts the password's digest into the ACL, so that the password itself is in no file and on no command line.
set -eu
umask 077
digest=$(printf %s "$REDIS_PASSWORD" | sha256sum | cut -d ' ' -f 1)
sed "s/@PASSWORD_SHA256@/$digest/" /etc/redis/users.acl > /run/redis/users.acl
# REDIS_ARGS is set by components/redis-tls and split into words here.
# shellcheck disable=SC2086
exec redis-server /etc/redis/redis.conf --aclfile /run/redis/users.acl ${REDIS_ARGS:-}
