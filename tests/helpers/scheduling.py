"""Schedulers and requests with the sizes that tests like."""

from collections.abc import Sequence
from typing import Any, Literal

from jaxllm.cache_policy import FULL, CachePolicy
from jaxllm.config import CacheOptions, SchedulerOptions
from jaxllm.outputs import EngineCoreOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import EngineCoreRequest, PromptItem, Request
from jaxllm.request_options import OPTION_NAMES, RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.admission import AdmissionRoom
from jaxllm.scheduler.cache_observer import CacheObserver
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.draft_control import DraftControl
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput

EOS = 50_000


def make_scheduler(
    *,
    num_blocks: int = 1000,
    block_size: int = 16,
    max_model_len: int = 8192,
    caching: bool = True,
    policies: Sequence[CachePolicy] = (FULL,),
    rooms: Sequence[AdmissionRoom] = (),
    drafts: DraftControl | None = None,
    num_stages: int = 1,
    tiers: Sequence[CacheTier] = (),
    kv_transfer_config: dict[str, Any] | None = None,
    kv_offloading_write: Literal["cold", "full"] = "cold",
    observer: CacheObserver | None = None,
    num_state_blocks: int = 0,
    prefix_cache_retention_interval: int = 0,
    token_sizes: Sequence[int] = (),
    **options: Any,
) -> Scheduler:
    """A scheduler without watermark or run-ahead unless asked."""
    options = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "watermark": 0.0,
        "async_scheduling": False,
        **options,
    }
    cache = CacheOptions(
        block_size=block_size,
        enable_prefix_caching=caching,
        kv_transfer_config=kv_transfer_config,
        kv_offloading_write=kv_offloading_write,
        prefix_cache_retention_interval=prefix_cache_retention_interval,
    )
    return Scheduler(
        SchedulerOptions(**options),
        cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        policies=policies,
        rooms=rooms,
        drafts=drafts,
        num_stages=num_stages,
        tiers=tiers,
        observer=observer,
        num_state_blocks=num_state_blocks,
        token_sizes=token_sizes,
    )


def make_request(
    request_id: str,
    prompt: int | list[int],
    *,
    eos: tuple[int, ...] = (EOS,),
    arrival: float = 0.0,
    pooling: PoolingParams | None = None,
    items: tuple[PromptItem, ...] = (),
    **others: Any,
) -> Request:
    """A request with the given prompt, or with one of that length that shares no beginning with another id's. others: fields of
    RequestOptions and SamplingParams."""
    options = {name: others.pop(name) for name in OPTION_NAMES if name in others}
    if isinstance(prompt, int):
        prompt = [sum(request_id.encode()) * 7 % 997] * prompt
    spec = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        items=items,
        sampling_params=SamplingParams(**{"max_tokens": 16, **others}),
        eos_token_ids=eos,
        arrival_time=arrival,
        options=RequestOptions(**options),
        pooling_params=pooling,
    )
    return Request(spec)


def result_of(scheduler: Scheduler, plan: SchedulerOutput, token: int = 7) -> ModelRunnerOutput:
    """Output of a runner that always samples the same token. To be made before the next step is planned."""
    sampled = {
        request_id: [token]
        for request_id in plan.num_scheduled_tokens
        if (request := scheduler.requests[request_id]).num_computed_tokens >= request.num_tokens
    }
    return ModelRunnerOutput(sampled)


def step(scheduler: Scheduler, token: int = 7) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Plan a step and take its tokens in."""
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, result_of(scheduler, plan, token))
    scheduler.check_integrity()
    return plan, outputs


def run_to_end(scheduler: Scheduler, token: int = 7) -> list[EngineCoreOutput]:
    """Step until every request has ended."""
    outputs = []
    while scheduler.has_requests():
        outputs += step(scheduler, token)[1]
    return outputs
