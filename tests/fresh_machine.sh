#!/usr/bin/env bash
# Runs a command of the README in a fresh Debian that has Python, venv, make and nothing else: no compiler, no Redis.
#
#   tests/fresh_machine.sh SUITE COMMAND      for example: tests/fresh_machine.sh trixie "make demo"
#
# The machine is a folder with a clean copy of HEAD. Its packages come from the mirror of this machine's apt, or from
# $MIRROR. The command runs as a user without rights, in namespaces of its own: at the end no mount and no process is
# left, whatever happened. Where no such machine can be made, the script explains why and exits with 0.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 command=$2

skip() {
    echo "make fresh: skipped: $1" >&2
    exit 0
}

[ "$(id -u)" = 0 ] || skip "it needs root"
command -v debootstrap >/dev/null || skip "debootstrap is not installed (Debian and Ubuntu: apt install debootstrap)"
unshare --mount --pid --fork true 2>/dev/null || skip "this machine does not allow mounts"
mirror=${MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' 'Component: main' |
    head -n 1 || true)}
[ -n "$mirror" ] || skip "apt knows no mirror of Debian; name one: MIRROR=... make fresh"

machine=$(mktemp -d "${TMPDIR:-/tmp}/ampd-fresh-XXXXXX")
child=
# The kernel ends every process of the child's namespace with the child.
trap '[ -z "$child" ] || kill -KILL "$child" 2>/dev/null || true; wait; rm -rf --one-file-system "$machine"' EXIT
trap 'exit 130' INT TERM HUP
chmod 755 "$machine"
echo "make fresh: $suite from $mirror, in $machine" >&2
# In the background, because bash handles a signal only after a child in the foreground has ended.
isolated() {
    unshare --mount --pid --fork --kill-child "$@" </dev/null &
    child=$!
    wait "$child"
}

log=$machine/debootstrap.log
isolated timeout --foreground 600 \
    debootstrap --variant=minbase --include=ca-certificates,make,python3,python3-venv "$suite" "$machine" "$mirror" \
    >"$log" 2>&1 || skip "debootstrap failed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"

# The network of this machine: names, proxies, certificates and the package index.
cp --dereference /etc/resolv.conf /etc/hosts "$machine/etc/"
certificates=/etc/ssl/certs/ca-certificates.crt
[ ! -e "$certificates" ] || cp --dereference "$certificates" "$machine$certificates"
network=(SSL_CERT_FILE="$certificates" PIP_CERT="$certificates")
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY PIP_INDEX_URL UV_DEFAULT_INDEX UV_INDEX; do
    [ -z "${!name:-}" ] || network+=("$name=${!name}")
done

home=/home/newcomer
echo "newcomer:x:1000:1000::$home:/bin/sh" >>"$machine/etc/passwd"
mkdir -p "$machine$home/ampd"
git archive HEAD | tar -x -C "$machine$home/ampd"
chown -R 1000:1000 "$machine$home"
export machine
# The shell stays: a process that changes its user does not end with its parent.
# shellcheck disable=SC2016  # the inner shell expands these
isolated sh -ec '
    mount -t proc proc "$machine/proc"
    mount --bind -o ro /sys "$machine/sys"
    mount -t tmpfs tmpfs "$machine/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$machine/dev/pts"
    "$@" || exit "$?"' enter \
    chroot --userspec=1000:1000 "$machine" /usr/bin/env -i HOME="$home" PATH=/usr/local/bin:/usr/bin:/bin \
    "${network[@]}" sh -c "cd $home/ampd && $command"
