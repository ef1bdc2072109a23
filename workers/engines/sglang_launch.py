"""SGLang's `Engine` with our way to start its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.engine import Engine

from workers.engines.engine_forks import AsHere, choose_start_method


def engine_class(on_manager: Callable[[Any], None]) -> Any:
    """A subclass of SGLang's `Engine`.

    Args:
        on_manager: gets the tokenizer manager when it is made, also if the engine then fails to start.
    """

    def init_manager(*args: Any, **kwargs: Any) -> Any:
        made = Engine.init_tokenizer_manager_func(*args, **kwargs)
        on_manager(made[0])
        return made

    class OurEngine(Engine):  # type: ignore[misc]
        init_tokenizer_manager_func = staticmethod(init_manager)
        run_scheduler_process_func = staticmethod(AsHere(Engine.run_scheduler_process_func))
        run_detokenizer_process_func = staticmethod(AsHere(Engine.run_detokenizer_process_func))

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            choose_start_method()  # SGLang has just chosen to spawn
            return super()._launch_scheduler_processes(*args, **kwargs)

    return OurEngine
