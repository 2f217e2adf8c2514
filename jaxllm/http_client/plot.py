"""Plots a load test: the time span of each request, and the distribution of latencies. Needs the extra `plot`."""

from jaxllm.errors import ConfigError
from jaxllm.http_client.load import LoadRun
from jaxllm.http_client.results import timing_of


def check_installed() -> None:
    """Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxllm[plot]'") from None


def draw(run: LoadRun, title: str, path: str) -> None:
    """Write the plot to a file; the suffix selects the format. Raises ConfigError."""
    from matplotlib.figure import Figure

    answered = sorted((outcome for outcome in run.outcomes if outcome.token_times), key=lambda outcome: outcome.start)
    began = min((outcome.start for outcome in run.outcomes), default=0.0)
    timings = [timing_of(outcome) for outcome in answered]
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    ((timeline, first), (each, whole)) = figure.subplots(2, 2)
    starts = [outcome.start - began for outcome in answered]
    rows = range(len(answered))
    timeline.barh(rows, [timing.first for timing in timings], left=starts, height=1.0, color="#f2a541", label="to first token")
    timeline.barh(
        rows,
        [timing.whole - timing.first for timing in timings],
        left=[start + timing.first for start, timing in zip(starts, timings, strict=True)],
        height=1.0,
        color="#3b7ea1",
        label="to last token",
    )
    timeline.set(xlabel="seconds", ylabel="request")
    timeline.legend(loc="upper left")
    series = [
        (first, "time to first token", [timing.first for timing in timings]),
        (each, "inter-token latency", [gap for timing in timings for gap in timing.gaps]),
        (whole, "end-to-end latency", [timing.whole for timing in timings]),
    ]
    for axes, name, seconds in series:
        if seconds:
            axes.ecdf([value * 1000 for value in seconds])
        axes.set(xlabel=f"{name} in ms", ylabel="fraction of all")
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {getattr(error, 'strerror', None) or error}") from None
