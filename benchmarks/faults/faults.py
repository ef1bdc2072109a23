"""All faults of the matrix, by name."""

from __future__ import annotations

from benchmarks.faults.connection_faults import CONNECTION_FAULTS
from benchmarks.faults.fault import Fault
from benchmarks.faults.foreign_workers import FOREIGN_FAULTS
from benchmarks.faults.kv_faults import KV_FAULTS
from benchmarks.faults.move_faults import MOVE_FAULTS
from benchmarks.faults.process_faults import PROCESS_FAULTS
from benchmarks.faults.redis_faults import REDIS_FAULTS
from benchmarks.faults.request_faults import REQUEST_FAULTS

NONE = Fault("none", "Reference", "no fault")
"""The reference for the added latency."""

_GROUPS = (PROCESS_FAULTS, CONNECTION_FAULTS, MOVE_FAULTS, FOREIGN_FAULTS, REDIS_FAULTS, KV_FAULTS, REQUEST_FAULTS)
FAULTS = {fault.name: fault for group in _GROUPS for fault in group}
