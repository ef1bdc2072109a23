"""A Redis with a replica, and three Sentinels that watch them: real servers on free ports of 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from ampd.child_process import tied_to_parent
from ampd.state.embedded import redis_server_path
from tests.harness.ports import free_ports
from tests.harness.tcp_redis import TcpRedis
from tests.waiting import until

SERVICE = "state"
_DOWN_AFTER_MS = 500
_PORTS_TRIED = 3


class Sentinels:
    """Runs the five servers while the context is open.

    Args:
        master: not started yet; None: a new one.
        watched_port: that of the master, as the Sentinels know it and tell it; None: its own.
        replica: not started yet; None: a new one. It may announce another port than its own.

    Attributes:
        ports: of the Sentinels.
        master: the first master; `stop` it, and the Sentinels promote `replica`.
    """

    def __init__(
        self, master: TcpRedis | None = None, watched_port: int | None = None, replica: TcpRedis | None = None
    ) -> None:
        self.master, self.replica = master or TcpRedis(), replica or TcpRedis()
        self._watched_port = watched_port or self.master.port
        self._stack = ExitStack()
        self.ports: list[int] = []
        self._logs: list[Path] = []

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{SERVICE}/0"

    @property
    def sentinel_url(self) -> str:
        """A Sentinel, as if it were a Redis."""
        return f"redis://127.0.0.1:{self.ports[0]}/0"

    def __enter__(self) -> Sentinels:
        with ExitStack() as stack:
            stack.enter_context(self.master)
            self.replica._arguments += ("--replicaof", "127.0.0.1", str(self.master.port))
            stack.enter_context(self.replica)
            self._wait_for_replica()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.ports = [self._start(folder / f"sentinel-{number}", stack) for number in range(3)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wait_for_replica(self) -> None:
        """A Sentinel asks a master for its replicas at once, and then only every 10 s."""
        with Redis.from_url(self.master.url) as client:
            while not client.info("replication")["connected_slaves"]:
                time.sleep(0.01)

    async def until_complete(self) -> None:
        """Wait until every Sentinel knows the replica and the other Sentinels, so that they can promote it.

        Raises:
            AssertionError: with the Sentinels' logs, if that does not come.
        """
        try:
            await until(self._is_complete, poll_s=0.05)
        except TimeoutError:
            raise AssertionError(self.log()) from None

    async def _is_complete(self) -> bool:
        return all(await asyncio.gather(*map(_knows_all, self.ports)))

    def log(self) -> str:
        """What the Sentinels have logged so far, for the message of a test that fails."""
        return "\n".join(path.read_text("utf-8", "replace") for path in self._logs)

    def _start(self, folder: Path, stack: ExitStack) -> int:
        folder.mkdir()
        for _ in range(_PORTS_TRIED):
            port = self._start_on(free_ports(1)[0], folder, stack)
            if port is not None:
                return port
        raise RuntimeError(f"no Sentinel started: {self.log()}")

    def _start_on(self, port: int, folder: Path, stack: ExitStack) -> int | None:
        """Start a Sentinel and wait until it answers; None if it ends, because the port is no longer free."""
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._watched_port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {_DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 5000",
        ]
        configuration, path = folder / "sentinel.conf", folder / f"{port}.log"
        configuration.write_text("\n".join(lines) + "\n")
        self._logs.append(path)
        with path.open("wb") as log:
            process = subprocess.Popen(
                tied_to_parent([str(redis_server_path()), str(configuration), "--sentinel"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as client:
                client.sendall(b"PING\r\n")
                if client.recv(64).startswith(b"+PONG"):
                    return port
            time.sleep(0.01)
        return None


async def _knows_all(port: int) -> bool:
    async with AsyncRedis.from_url(f"redis://127.0.0.1:{port}/0") as sentinel:
        try:
            (master,) = (await sentinel.sentinel_masters()).values()
        except (OSError, RedisError):
            return False
    return bool(master["num-slaves"] >= 1 and master["num-other-sentinels"] >= 2)
