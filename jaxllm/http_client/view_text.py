"""The text of the figures of `scrape.view`, for `jaxllm top`."""

from collections.abc import Iterable, Mapping
from typing import Any

LATENCY_NAMES = {"ttft": "first token", "itl": "between tokens", "queue": "in the queue", "e2el": "whole request"}


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """The view as text, a line for each figure."""
    return [f"{name:<20}{text}" for name, text in figures(found)]


def figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and formatted values of the figures on the screen."""
    hit_rate, drafts = found["prefix_cache_hit_rate"], found["drafts"]
    rows = [
        ("model", ", ".join(found["models"])),
        ("running", f"{found['num_requests_running']:.0f} requests"),
        ("waiting", f"{found['num_requests_waiting']:.0f} requests"),
        ("compiling", _compiling(found)),
        ("stalled", _stalled(found)),
        ("KV cache", f"{found['kv_cache_usage']:.1%}"),
        ("prefix cache hits", "–" if hit_rate is None else f"{hit_rate:.1%}"),
        ("host memory", _host_memory(found["host_memory"])),
        ("prompt", f"{found['prompt_tokens_per_second']:.1f} tokens/s"),
        ("generation", f"{found['generation_tokens_per_second']:.1f} tokens/s"),
        ("drafts", "" if drafts is None else _drafts(drafts)),
        ("encoder", _encoder(found["encoder"])),
        ("preemptions", f"{found['preemptions']:.0f}" if found["preemptions"] else ""),
    ]
    for name, percentiles in found["latency_ms"].items():
        text = "–" if percentiles is None else "  ".join(f"{key} {_ms(value)}" for key, value in percentiles.items())
        rows.append((LATENCY_NAMES[name], text))
    rows += [("ended", _counts(found["finished"])), ("HTTP", _counts(found["http"]))]
    return [(name, text) for name, text in rows if text]


def _compiling(found: Mapping[str, Any]) -> str:
    programs = found["compiling"]
    return f"program {programs['ready'] + 1:.0f} of {programs['total']:.0f}; requests wait for it" if programs else ""


def _stalled(found: Mapping[str, Any]) -> str:
    return f"{found['stalled_engines']:.0f} engines seem to hang" if found["stalled_engines"] else ""


def _drafts(report: Mapping[str, Any]) -> str:
    if not report["spec_decode_num_drafts"]:
        return "–"
    rate, length = report["spec_decode_acceptance_rate"], report["spec_decode_acceptance_length"]
    return f"{rate:.1f}% accepted, {length:.2f} tokens a step of a request"


def _encoder(report: Mapping[str, float] | None) -> str:
    if report is None:
        return ""
    padding = 1 - report["patches"] / report["computed_patches"]
    return f"{report['patches']:.0f} patches, {padding:.0%} of what it computed was padding"


def _host_memory(report: Mapping[str, float | None] | None) -> str:
    if report is None:
        return ""
    rates = [f"{name}s {(report[f'{name}_bytes_per_second'] or 0) / 1e9:.1f} GB/s" for name in ("store", "load")]
    parts = [f"{report['usage']:.1%}", *rates, f"{report['num_requests_loading']:.0f} requests loading"]
    parts += [] if report["hit_rate"] is None else [f"hits {report['hit_rate']:.1%}"]
    parts += [f"{report['skipped_stores']:.0f} blocks not copied"] if report["skipped_stores"] else []
    return ", ".join(parts)


def _counts(found: Mapping[str, Mapping[str, float]]) -> str:
    shown = [f"{label} {count['total']:.0f} (+{count['new']:.0f})" for label, count in found.items() if count["total"]]
    return ", ".join(shown) or "–"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def sparkline(values: Iterable[float]) -> str:
    """A line of bars, scaled to the largest value."""
    listed = list(values)
    top = max(listed, default=0.0)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(marks[min(len(marks) - 1, int(value / top * len(marks)))] if top > 0 else marks[0] for value in listed)
