"""The bounds of the histograms."""

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
PHASE_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *REQUEST_SECONDS)
"""For queueing and prefill, which take milliseconds on an engine that is not overloaded."""
HTTP_ALL_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5),
    *(7.5, 10, 30, 60),
)
"""Buckets of prometheus-fastapi-instrumentator, for requests of all routes together."""
SLEEP_SECONDS = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
ANSWERS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20)


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to the limit."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [decade * step for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return bounds
