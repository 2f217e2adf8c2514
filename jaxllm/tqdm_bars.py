"""Progress bars of `LLM`, by tqdm."""

from collections.abc import Callable
from typing import Any

from jaxllm.progress import Progress


class LoadingBar(Progress):
    """Shows the progress of loading and compiling with tqdm."""

    def __init__(self) -> None:
        self._bar: Any = None

    def start(self, task: str, total: int | None, unit: str) -> None:
        self._bar = open_bar(True, total, task.capitalize(), unit)

    def advance(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def open_bar(use_tqdm: bool | Callable[..., Any], total: int | None, description: str, unit: str) -> Any:
    """A bar; `use_tqdm` says whether it is shown, or is a replacement for tqdm."""
    from tqdm.auto import tqdm

    make: Callable[..., Any] = use_tqdm if callable(use_tqdm) else tqdm
    options: dict[str, Any] = {} if use_tqdm else {"disable": True}
    options |= {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if unit == "B" else {"unit": f" {unit}"}
    return make(total=total, desc=description, dynamic_ncols=True, **options)
