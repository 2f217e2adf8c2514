"""The environment variables that jaxllm itself reads, in one table. Options of the engine are config fields, not variables here."""

import os
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.whole_numbers import whole_number

CONFIG_FILE = "JAXLLM_CONFIG"  # path of a YAML file with engine options
CACHE_DIR = "JAXLLM_CACHE_DIR"  # where compiled programs are kept
CACHE_BYTES = "JAXLLM_CACHE_BYTES"  # how much they may take there
FAULT = "JAXLLM_FAULT"  # failures to inject, for rehearsals: docs/FAULTS.md
LOG_LEVEL = "JAXLLM_LOG_LEVEL"  # debug, info, warning, error
LOG_FORMAT = "JAXLLM_LOG_FORMAT"  # text, json
API_KEY = "JAXLLM_API_KEY"  # the key of a server: what clients here send
HOSTS_TOKEN = "JAXLLM_HOSTS_TOKEN"  # a secret that all hosts of one server must know
KV_TOKEN = "JAXLLM_KV_TOKEN"  # a secret that prefill and decode engines share
OPTION_PREFIX = "JAXLLM_OPT_"  # JAXLLM_OPT_MAX_NUM_SEQS=64 sets --max-num-seqs
VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"  # as LOG_LEVEL, which wins; all others of vLLM: jaxllm/vllm_compat/environment.py
VLLM_CACHE_ROOT = "VLLM_CACHE_ROOT"  # its folder jaxllm is as CACHE_DIR, which wins


KERNEL_VERDICTS = "kernel_checks"  # a folder of the cache directory: what kernel checks found


def cache_dir() -> Path:
    """The folder for compiled programs: $JAXLLM_CACHE_DIR, else the folder jaxllm of $VLLM_CACHE_ROOT, $XDG_CACHE_HOME or ~/.cache."""
    if path := os.environ.get(CACHE_DIR):
        return Path(path).expanduser()
    base = os.environ.get(VLLM_CACHE_ROOT) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jaxllm"


def cache_bytes() -> int:
    """Most bytes that a folder of compiled programs keeps from start to start: $JAXLLM_CACHE_BYTES, else 4 GiB. Raises ConfigError."""
    text = os.environ.get(CACHE_BYTES) or "4G"
    try:
        if (found := whole_number(text)) >= 0:
            return found
        reason = "must be at least 0"
    except ValueError as error:
        reason = str(error)
    raise ConfigError(f"${CACHE_BYTES} is {text!r}: {reason}")


def log_level() -> tuple[str, str] | None:
    """The level of the log that the environment asks for, in lower case, and the variable that says so."""
    if level := os.environ.get(LOG_LEVEL):
        return level.lower(), LOG_LEVEL
    if level := os.environ.get(VLLM_LOG_LEVEL):
        return {"critical": "error", "fatal": "error", "warn": "warning"}.get(level.lower(), level.lower()), VLLM_LOG_LEVEL
    return None
