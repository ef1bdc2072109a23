"""`python -m router` whose Dynamo runtime ends without a signal, as when the machine is out of inotify instances."""

from ampd.child_process import exit_now
from router.__main__ import main
from router.process import CoordinatorProcess

_register = CoordinatorProcess._register


async def _end(process: CoordinatorProcess) -> None:
    await _register(process)
    process._runtime.shutdown()


if __name__ == "__main__":
    CoordinatorProcess._register = _end
    exit_now(main())
