"""Chooses the kernels of an engine: only those that give correct results on this kind of device, in the model's own shapes.

At the start, each chosen implementation computes edge cases (`pallas_kernels.checking`) twice. One that fails is replaced by
the next in order of preference. Verdicts are kept on disk. A kernel that hangs cannot be stopped within its process: after a
minute the start fails, but the verdict is kept, so that the next start uses another implementation. Programs may be compiled
meanwhile (`early_programs.py`); nothing that the engine computes runs before the verdict.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.device_errors import Failure, kind_of
from jaxllm.engine.fingerprint import surroundings
from jaxllm.engine.kernel_choice import PLAIN, Candidates
from jaxllm.engine.kernel_shapes import NO_PRODUCTS, ProductShapes, shapes_of
from jaxllm.errors import KernelCheckError
from jaxllm.kernel_verdicts import OpReport, Subject, Verdict, VerdictStore
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import tensor_size
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import MemoryPlan
from pallas_kernels.checking import (
    attention_at_start,
    collectives,
    delta_decode,
    expert_choice,
    gated_delta,
    gated_matmul,
    grouped_matmul,
    lora,
    mla_attention,
    quantize,
    quantized_matmul,
    rope_cache_write,
    router_scores,
    sampling,
    segment_attention,
    state_space,
)
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.check import Fault, check
from pallas_kernels.verified import is_verified, source_digest

COLLECTIVES = "collectives"
_CASES: dict[str, Any] = {
    "paged_attention": attention_at_start.cases,
    "wide_attention": attention_at_start.cases_of_wide_heads,
    "rope_cache_write": rope_cache_write.cases,
    "expert_choice": expert_choice.cases,
    "gated_delta": gated_delta.cases,
    "delta_decode": delta_decode.cases,
    "grouped_matmul": grouped_matmul.cases,
    "gated_matmul": gated_matmul.cases,
    "lora": lora.cases,
    "mla_attention": mla_attention.cases,
    "quantize": quantize.cases,
    "quantized_matmul": quantized_matmul.cases,
    "router_scores": router_scores.cases,
    "sampling": sampling.cases,
    "segment_attention": segment_attention.cases,
    "state_space": state_space.cases,
}


@dataclass(frozen=True)
class Choice:
    """The kernels of an engine, with the reasons for the choice."""

    kernels: Kernels
    report: dict[str, OpReport]
    """Reports by op."""


def choose_kernels(
    found: Candidates,
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    *,
    device: jax.Device,
    store: VerdictStore,
    is_named: bool,
    mesh: Mesh | None = None,
    adaptation: Adaptation | None = None,
    products: ProductShapes = NO_PRODUCTS,
    meanwhile: Callable[[Kernels], None] = lambda kernels: None,
) -> Choice:
    """Choose the first candidate of each op that passes the check set by `config.compile.kernel_check`.

    device: the first of the mesh, on which everything except collectives is checked. mesh: None for one device.
    is_named: the user named this attention implementation, so it is never replaced. products: the weights that kernels multiply.
    meanwhile: called before the first kernel runs, with the kernels that will be chosen if all that are checked are right.
    Raises KernelCheckError if no implementation of an op is left, or a check lost the device.
    """
    is_one = mesh is None or tensor_size(mesh) == 1
    attention = ("segment_attention",) if model.encoder is not None else ("paged_attention", "wide_attention", "mla_attention")
    skipped = {*(() if model.generates else ("sampling",)), *((COLLECTIVES,) if is_one else ())}
    check_ = KernelCheck(
        found=found,
        shapes=shapes_of(config, model, plan, adaptation, products),
        mode=config.compile.kernel_check,
        device=device,
        mesh=mesh,
        store=store,
        named=frozenset(attention) if is_named else frozenset(),
        ops=tuple(op for op in found if op not in skipped),
    )
    return check_.run(meanwhile)


def _is_newer(shapes: Any) -> bool:
    """Whether kernels that were carried over may lack these shapes: attention over parts of the keys, and packed experts."""
    return getattr(shapes, "num_parts", 1) > 1 or getattr(shapes, "stored", None) is not None


@dataclass
class KernelCheck:
    """The kernel check of one start. Checks several ops at the same time."""

    found: Candidates
    shapes: dict[str, tuple[Any, ...]]
    mode: str
    mesh: Mesh | None
    device: jax.Device
    store: VerdictStore
    named: frozenset[str]
    """Ops whose implementation the user named."""
    ops: tuple[str, ...]
    """Ops that the engine runs."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """Candidates of each op that have not failed."""
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    """By op, the faults of the failed candidates."""
    passed: dict[str, str] = field(default_factory=dict)
    """How each op's first candidate passed."""
    num_programs: int = 0
    num_rounds: int = 0

    def run(self, meanwhile: Callable[[Kernels], None] = lambda kernels: None) -> Choice:
        """Check until the first candidate of each op passes. meanwhile: see `choose_kernels`."""
        started = time.perf_counter()
        self.left = {op: list(names) for op, names in self.found.items()}
        self.failed = {op: {} for op in self.left}
        if self.mode == "off":
            self._keep_verified()
        while todo := [op for op in self.ops if op not in self.passed and self._wants_check(op)]:
            if unknown := [op for op in todo if not self._remembers(op)]:
                if not self.num_rounds:
                    meanwhile(self._kernels())
                self.num_rounds += 1
                self._judge(unknown)
        if self.passed and self.mode != "off":
            names = ", ".join(f"{op} {self.left[op][0]}" for op in self.passed)
            ran = f"{self.num_programs} programs, {time.perf_counter() - started:.1f} s"
            logger.info(
                "kernel check on %s: %s: right (%s)", self.device.device_kind, names, ran if self.num_programs else "before"
            )
        report: dict[str, OpReport] = {
            op: OpReport(self.left[op][0], self.passed.get(op, "not run"), self.failed[op])  # type: ignore[arg-type]
            for op in self.ops
        }
        return Choice(self._kernels(), report)

    def _kernels(self) -> Kernels:
        """The first candidates that are left."""
        first = {op: names[0] for op, names in self.left.items()}
        interpret = self.device.platform == "cpu" and any(name not in PLAIN for name in first.values())
        return Kernels(**first, interpret=interpret)

    def _wants_check(self, op: str) -> bool:
        """With `auto`, plain JAX is not checked unless it replaces a kernel that failed."""
        if self.mode == "auto":
            return self.device.platform != "cpu" and (self.left[op][0] not in PLAIN or bool(self.failed[op]))
        return self.mode == "always"

    def _keep_verified(self) -> None:
        """Choose without a check: plain JAX, implementations that the user named, and those verified on this kind of device."""
        kind = self.device.device_kind
        for op, names in self.left.items():
            if op in self.named or names[0] in PLAIN:
                continue
            if is_verified(kind, op, carried=not any(map(_is_newer, self.shapes.get(op, ())))):
                self.passed[op] = "verified"
                continue
            kept = [name for name in names if name in PLAIN]
            logger.warning(
                "kernel_check is off, and the kernels of %s (%s) were not verified on %s: %s is used, which is slower; start "
                "with --kernel-check auto to check them and use what is right",
                *(op, ", ".join(name for name in names if name not in PLAIN), kind, kept[0]),
            )
            self.left[op] = kept

    def _remembers(self, op: str) -> bool:
        """Apply the stored verdict on an op's first candidate, if there is one."""
        verdict = self.store.load(self._subject(op)) if self.mode == "auto" else None
        if verdict is None:
            return False
        self._take(op, verdict.fault, "passed before")
        return True

    def _judge(self, ops: Sequence[str]) -> None:
        """Check the first candidates of these ops and keep the verdicts."""
        cases: list[tuple[str, Case]] = []
        interpret = self.device.platform == "cpu"
        faults: dict[str, str] = {}
        for op in ops:
            if op == COLLECTIVES:
                faults |= self._faults_of_collectives()
                continue
            try:
                for shapes in self.shapes[op]:
                    cases += [(op, case) for case in _CASES[op](shapes, self.left[op][0], interpret=interpret)]
            except Exception as error:  # a kernel whose module cannot be imported
                faults[op] = f"{type(error).__name__}: {error}"
        found = check([case for _, case in cases], is_fatal=_is_fatal)
        self.num_programs += len(cases)
        forgettable: set[str] = set()
        for (op, case), fault in zip(cases, found, strict=False):
            if fault is not None and op not in faults:
                faults[op] = f"{case.name}: {fault.text}"
                if fault.error is not None and kind_of(fault.error) == Failure.OUT_OF_MEMORY:
                    forgettable.add(op)  # not a fault of the kernel
        not_run = {op for op, _ in cases[len(found) :]}
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        for op in ops:
            if op not in forgettable and (op in faults or op not in not_run):
                self.store.save(Verdict(self._subject(op), faults.get(op), now))
        if found and (last := found[-1]) is not None and (last.hangs or (last.error is not None and _is_fatal(last.error))):
            self._give_up(*cases[len(found) - 1], last)
        for op in ops:
            self._take(op, faults.get(op), "passed")

    def _faults_of_collectives(self) -> dict[str, str]:
        """The first fault found between the devices, by op."""
        assert self.mesh is not None, "one device has nothing to exchange"
        cases = collectives.singles_at_start(*self.shapes[COLLECTIVES])
        self.num_programs += len(cases)
        for name, fault in collectives.check(self.mesh, implementation=self.left[COLLECTIVES][0], cases=cases):
            if fault is not None:
                return {COLLECTIVES: f"{name}: {fault.text}"}
        return {}

    def _take(self, op: str, fault: str | None, how: str) -> None:
        """Apply a verdict. Raises KernelCheckError if no candidate is left."""
        if fault is None:
            self.passed[op] = how
            return
        kind, name = self.device.device_kind, self.left[op].pop(0)
        self.failed[op][name] = fault
        if op in self.named:
            raise KernelCheckError(
                f"attention_implementation is {name!r}, which fails the kernel check on {kind} ({fault}); use auto, or "
                "--kernel-check off to use it all the same"
            )
        if not self.left[op]:
            tried = "; ".join(f"{name}: {fault}" for name, fault in self.failed[op].items())
            raise KernelCheckError(
                f"no implementation of {op} gives right results on {kind} ({tried}); see `jaxllm env` for the versions of JAX and "
                "the driver and try others, or start with --kernel-check off to use plain JAX unchecked"
            )
        logger.warning(
            "kernel check: %s by %s is not used on %s, because it failed in the case %s; %s takes its place",
            *(op, name, kind, fault, self.left[op][0]),
        )

    def _give_up(self, op: str, case: Case, fault: Fault) -> None:
        raise KernelCheckError(
            f"{op} by {self.left[op][0]} made {self.device.device_kind} unusable for this process in the kernel check "
            f"({case.name}: {fault.text}); start again: if the cache directory can be written, it is then not used; or start with "
            "--attention-implementation xla, which uses no kernels"
        )

    def _subject(self, op: str) -> Subject:
        digests = [source_digest(folder) for folder in (op, "checking")]
        return Subject(
            op=op,
            implementation=self.left[op][0],
            source="-".join(digests),
            surroundings=surroundings(self.device),
            shapes=[dataclasses.asdict(shapes) for shapes in self.shapes[op]],
        )


def _is_fatal(error: BaseException) -> bool:
    """Whether the device is lost. A driver error alone does not show it: perhaps only one program could not be loaded."""
    return kind_of(error) == Failure.ENGINE and not _device_answers()


def _device_answers() -> bool:
    try:
        return bool(np.asarray(jax.device_put(np.ones(1, np.float32)))[0] == 1)
    except Exception:  # any error means that the device does not answer
        return False
