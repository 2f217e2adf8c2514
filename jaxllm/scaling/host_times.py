"""How the host of an engine core spent a series of steps."""

from typing import Any


class HostTimes:
    """Counts from when it is made."""

    def __init__(self, core: Any):
        self._core = core
        self._before = self._now()

    def per_step(self) -> dict[str, float]:
        """Steps dispatched since, and milliseconds for each of them."""
        steps, dispatch, launch, wait = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return {
            "steps": steps,
            "dispatch_ms_per_step": dispatch / steps * 1e3,
            "launch_ms_per_step": launch / steps * 1e3,
            "wait_ms_per_step": wait / steps * 1e3,
        }

    def _now(self) -> tuple[float, ...]:
        runner, loop = self._core.runner, self._core.loop
        return runner.num_steps, runner.dispatch_seconds, runner.launch_seconds, loop.wait_seconds


def num_compiled(core: Any) -> int:
    """Number of programs that requests have waited for so far: if it grows during a run, the run's time is not valid."""
    if core.config.compile.warmup == "lazy":  # no program counts as warmed up
        return int(core.runner.programs.num_compiled + core.runner.programs.num_loaded)
    return int(core.num_compiled_after_warmup)
