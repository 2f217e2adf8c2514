"""The options of experts that move between devices, by the load that was measured. The names are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.log import info_once


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """When experts move, and how many copies there are. Make it with `of`, which checks it."""

    window_size: int = 1000
    """Steps whose tokens are counted before experts move."""
    step_interval: int = 3000
    """Steps from one choice of places to the next."""
    num_redundant_experts: int = 0
    """Second and further copies of experts, in each mixture, over all devices."""
    log_balancedness: bool = False
    """Log the balance before experts move, and the one expected after it."""

    @classmethod
    def of(cls, raw: Mapping[str, Any] | None) -> "EplbConfig":
        """From the JSON object. Raises ConfigError with the first thing that is wrong."""
        given, known = dict(raw or {}), {field.name: field for field in fields(cls)}
        for name, value in given.items():
            if name in NO_EFFECT:
                continue
            if name not in known:
                raise ConfigError(f"eplb_config has {name!r}, which is unknown; it takes {', '.join(known)}")
            of_type = type(known[name].default)
            if type(value) is not of_type:
                raise ConfigError(f"eplb_config.{name} is {value!r}, must be {of_type.__name__}")
        given = {name: value for name, value in given.items() if name in known}
        config = cls(**given)
        for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
            if getattr(config, name) < least:
                raise ConfigError(f"eplb_config.{name} is {getattr(config, name)}, must be at least {least}")
        if config.window_size > config.step_interval:
            # vLLM's default of window_size is capped for those who only set a shorter interval.
            if "window_size" in given:
                raise ConfigError(
                    f"eplb_config.window_size is {config.window_size}, more than step_interval, {config.step_interval}: tokens are counted "
                    "between two choices of places; lower it, or raise step_interval"
                )
            config = cls(**{**given, "window_size": config.step_interval})
        return config


NO_EFFECT = {
    "use_async": "a layer moves between two steps, and none waits for the host",
    "policy": "there is one",
    "communicator": "devices exchange weights as they exchange activations",
    "log_balancedness_interval": "the balance is in the log's usual line, every 10 seconds",
    "enable_migration_batching": "each layer moves as a whole",
}
"""Further keys of vLLM's object, which have no effect here, with the reason."""


def tell_unused_keys(raw: Mapping[str, Any] | None) -> None:
    """Log the keys that change nothing."""
    for name, value in (raw or {}).items():
        if name in NO_EFFECT:
            info_once(f"eplb_config.{name} {value!r} changes nothing here: {NO_EFFECT[name]}")


def eplb_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with the options of experts that move, and with related ones."""
    raw, is_on = flat["eplb_config"], flat["enable_eplb"]
    if not isinstance(raw, dict | None) or not isinstance(is_on, bool):
        return []  # reported already
    if not is_on:
        return (
            [] if raw is None else ["eplb_config is set, but enable_eplb is not, so no expert moves; set it, or leave both out"]
        )
    try:
        EplbConfig.of(raw)
    except ConfigError as error:
        return [str(error)]
    wrong = (
        (
            not flat["enable_expert_parallel"] or flat["tensor_parallel_size"] == flat["data_parallel_size"] == 1,
            "no device has whole experts: add enable_expert_parallel, and a tensor_parallel_size or data_parallel_size above 1, or leave "
            "it out",
        ),
        (
            flat["enable_lora"],
            "adapters change experts by their numbers, not by their places: leave out enable_lora or enable_eplb",
        ),
        (
            flat["prefill_context_parallel_size"] > 1,
            "the devices of prefill_context_parallel_size count different tokens: leave one of them out",
        ),
        (flat["expert_load"] is False, "expert_load is off, by which experts move: leave one of them out"),
    )
    return [f"enable_eplb is set, but {reason}" for is_wrong, reason in wrong if is_wrong]
