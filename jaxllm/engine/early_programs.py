"""Chooses the kernels of an engine, and makes the programs of those that are expected to be right while they are checked."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.engine.executor import DeviceRunner
from jaxllm.engine.kernel_check import Choice, choose_kernels
from jaxllm.engine.kernel_choice import candidates
from jaxllm.engine.kernel_shapes import ProductShapes
from jaxllm.kernel_verdicts import VerdictStore
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.runner import ModelRunner


@dataclass
class EarlyPrograms:
    """The runner of an engine, made as soon as it is known which kernels will be chosen if they are right. Its programs are compiled
    from then on, but nothing runs them before the verdict."""

    make: Callable[[Kernels], DeviceRunner]
    warmup: str | None
    """The option; None: wait for the verdict. Concurrent compilation could delay devices, which wait for each other."""
    _runners: dict[Kernels, ModelRunner] = field(default_factory=dict)

    def choose(
        self,
        wanted: str,
        config: EngineConfig,
        model: ModelConfig,
        plan: MemoryPlan,
        mesh: Mesh,
        adaptation: Adaptation | None,
        products: ProductShapes,
    ) -> Choice:
        """Choose kernels that pass the kernel check. `wanted` is the option attention_implementation as given."""
        device = mesh.local_devices[0]
        has: dict[str, Any] = {
            "has_adapters": adaptation is not None,
            "has_tiles": bool(products.linears),
            "expert_types": products.expert_types,
            "gated": products.gated,
        }
        with self._left_on_error():
            return choose_kernels(
                candidates(wanted, model, plan, mesh, on_gpu=device.platform != "cpu", **has),
                config,
                model,
                plan,
                device=device,
                mesh=mesh,
                store=VerdictStore(env.cache_dir() / env.KERNEL_VERDICTS),
                is_named=wanted != "auto",
                adaptation=adaptation,
                products=products,
                meanwhile=self._begin,
            )

    def runner_of(self, kernels: Kernels) -> DeviceRunner:
        """The runner of the kernels that were chosen. One of others ends, with its programs."""
        found = self._runners.pop(kernels, None)
        for other in self._runners.values():
            logger.info("the programs made so far are dropped, because other kernels take the place of their own")
            other.close()
        self._runners.clear()
        return self.make(kernels) if found is None else found

    def _begin(self, kernels: Kernels) -> None:
        if self.warmup not in ("all", "background"):
            return
        runner = self.make(kernels)
        assert isinstance(runner, ModelRunner), "a divided runner"
        self._runners[kernels] = runner
        runner.start_programs(rare_later=self.warmup == "background")

    @contextlib.contextmanager
    def _left_on_error(self) -> Iterator[None]:
        """After an error, start no more programs. Those being made are not awaited: a hung device may hold them for ever."""
        try:
            yield
        except BaseException:
            for runner in self._runners.values():
                runner.programs.leave()
            raise
