"""Times a read by NIXL alone, without page keys, leases and records: the rate that the KV exchange is compared with."""

from __future__ import annotations

import time
from concurrent.futures import Future

from workers.kv.nixl_transport import NixlTransport, blocks_at
from workers.kv.peer_reads import Remote

BLOCK_BYTES = 1 << 20


class RawTransport(NixlTransport):
    """The real transport, which can also read alone."""

    def raw(self, remote: Remote, size_bytes: int) -> float:
        """Seconds of one READ of the first bytes of both stores, in large blocks, polled without a pause.

        Raises:
            ConnectionError: the read failed.
        """
        done: Future[float] = Future()

        def read() -> None:
            try:
                done.set_result(self._raw(remote, size_bytes))
            except Exception as error:
                done.set_exception(error)

        self._jobs.put(read)
        return done.result()

    def _raw(self, remote: Remote, size_bytes: int) -> float:
        blocks = [(at, min(BLOCK_BYTES, size_bytes - at)) for at in range(0, size_bytes, BLOCK_BYTES)]
        theirs = self._agent.get_xfer_descs(blocks_at(remote.address, blocks), "DRAM")
        ours = self._agent.get_xfer_descs(blocks_at(self._address, blocks), "DRAM")
        handle = self._agent.initialize_xfer("READ", ours, theirs, self._remote_agent(remote))
        started_s = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started_s
        handle.release()
        if state != "DONE":
            raise ConnectionError(f"NIXL ended a read with {state}")
        return seconds
