"""Options of a server and of its engines together: what they exclude, and defaults that many clients change."""

from typing import Any

from jaxllm.config import SERVED_QUEUED_IMAGE_GB, SERVED_QUEUED_REQS, SERVED_QUEUED_TOKENS, EngineConfig
from jaxllm.log import logger
from server.options import ServerOptions


def check_together(options: ServerOptions, config: EngineConfig) -> None:
    """Raise ConfigError or AdapterError for options of a server that its engines' exclude, or that name what does not exist."""
    from server.adapters import check_adapter_options

    check_adapter_options(options.adapters, config, options.replies.names_of(config.model.model))
    if options.chat.names_dialects:
        from server.speech import check_names  # imports all dialects

        check_names(options.chat)


def served_config(config: EngineConfig, options: ServerOptions) -> EngineConfig:
    """The options of a server's engines: clients in turn if there may be several, and a queue with an end."""
    scheduler = config.scheduler
    found: dict[str, Any] = {}
    if scheduler.scheduling_policy == "auto":
        found["scheduling_policy"], why = _policy(options)
        logger.info("scheduling policy: %s (%s)", found["scheduling_policy"], why)
    if scheduler.max_num_queued_reqs is None:
        found["max_num_queued_reqs"] = SERVED_QUEUED_REQS
    if scheduler.max_num_queued_tokens is None:
        found["max_num_queued_tokens"] = SERVED_QUEUED_TOKENS
    if scheduler.max_queued_image_gb is None:
        found["max_queued_image_gb"] = SERVED_QUEUED_IMAGE_GB
    return config.replace(**found) if found else config


def _policy(options: ServerOptions) -> tuple[str, str]:
    """The policy that serves the clients that the server can tell apart, and why."""
    keys = set(options.access.api_key or ())
    if len(keys) > 1:
        return "fair", f"there are {len(keys)} keys; --scheduling-policy fcfs: by arrival"
    if keys:
        return "fcfs", "there is one key"
    if options.network.uds is not None:
        return "fcfs", "clients of a Unix socket have no addresses"
    return "fair", "clients by address; --scheduling-policy fcfs: by arrival"
