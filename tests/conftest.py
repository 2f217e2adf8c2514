"""Tests run on eight virtual CPU devices. JAX reads these when it is first imported, which is after this file."""

import os
import signal

# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
