"""Redis' clock, which the harness can step: the product's scripts ask for the time through an offset.

A step of a real clock does two things. Scripts get another time, and every key comes nearer to its end or farther from
it. Both are done here, because a process cannot change the clock of another one.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Any

OFFSET_KEY = "faults:clock_s"
_TIME = "redis.call('TIME')"
_STEPPED = f"""\
(function()
  local time = redis.call('TIME')
  return {{time[1] + (redis.call('GET', '{OFFSET_KEY}') or 0), time[2]}}
end)()"""

_SHIFT = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left_ms = redis.call('PTTL', key)
  if left_ms > 0 then
    redis.call('PEXPIRE', key, left_ms - ARGV[1] * 1000)
  end
end
return redis.call('INCRBY', KEYS[1], ARGV[1])
"""


def install_clock() -> None:
    """Let the scripts of this process ask for the stepped time."""
    from ampd.state import redis_connection

    script = redis_connection._script

    def stepped(name: str) -> tuple[str, str]:
        text = script(name)[0].replace(_TIME, _STEPPED)
        return text, sha1(text.encode(), usedforsecurity=False).hexdigest()

    redis_connection._script = stepped  # type: ignore[assignment]


async def step_clock(client: Any, seconds: int) -> None:
    """Step the clock forward, or backward if negative. Keys whose time is over are gone at once."""
    await client.eval(_SHIFT, 1, OFFSET_KEY, seconds)
