"""Tests run on eight virtual CPU devices. JAX reads these when it is first imported, which is after this file."""

import os
import signal

from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Searched inputs are the same in each run, however slow the machine is; `--hypothesis-profile default --hypothesis-seed 1` searches others.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
