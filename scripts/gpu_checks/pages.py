"""A device's record as a page, and the README's sentence on verified devices."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import verified

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = Path("docs/verified")
README = Path("README.md")
COMMAND = "python scripts/verified_pages.py"
SAME_KERNELS = "verified with the same kernels"
"""State of an op that `carrying.carry` carried over."""
SENTENCE = "Verified with `scripts/check_gpu.py`:"
"""How the README's line on verified devices begins."""


def write_pages(records: Mapping[str, Any], root: Path = ROOT) -> list[Path]:
    """Write every device's page and the README's sentence. Returns the written files."""
    written = []
    (root / PAGES).mkdir(parents=True, exist_ok=True)
    for device_kind, record in records.items():
        path = root / PAGES / page_name(device_kind)
        path.write_text(render_page(device_kind, record), encoding="utf-8")
        written.append(path)
    readme = root / README
    text = readme.read_text(encoding="utf-8")
    changed = re.sub(rf"^{re.escape(SENTENCE)}.*$", lambda _: readme_sentence(records), text, flags=re.MULTILINE)
    if changed != text:
        readme.write_text(changed, encoding="utf-8")
        written.append(readme)
    return written


def page_name(device_kind: str) -> str:
    """`NVIDIA_H200.md`"""
    return re.sub(r"\W+", "_", device_kind).strip("_") + ".md"


def readme_sentence(records: Mapping[str, Any]) -> str:
    """Which devices have a record, with a link to the folder of their pages."""
    kinds = ", ".join(sorted(records))
    return f"{SENTENCE} {f'[{kinds}]({PAGES}/)' if kinds else 'no device yet'}."


def render_page(device_kind: str, record: Mapping[str, Any]) -> str:
    """A device's page: what was run when, and which ops have changed since."""
    lines = [
        f"# {device_kind}",
        "",
        f"Last run of `scripts/check_gpu.py` recorded on {record['date']}, commit {record['commit']}:",
        ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items())) + ".",
        "",
        "| part | passed | failed | skipped | seconds | date | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    parts = sorted(record["parts"].items())
    for name, part in parts:
        counts = f"{part['passed']} | {part['failed']} | {part['skipped']} | {part['seconds']}"
        lines.append(f"| {name} | {counts} | {part['date']} | {part['commit']} |")
    notes = [f"- Skipped in {name}: {part['note']}." for name, part in parts if part["note"]]
    lines += [*([""] if notes else []), *notes]
    lines += ["", "| op | verified source | source now | status |", "|---|---|---|---|"]
    kept = {op: each for op, each in sorted(record.get("carried", {}).items()) if record["ops"].get(op) == each["now"]}
    for op in verified.OPS:
        found, now = record["ops"].get(op), verified.source_digest(op)
        shown = kept[op]["verified"] if op in kept else found
        status = SAME_KERNELS if op in kept and found == now else _status(found, now)
        lines.append(f"| {op} | {shown or '–'} | {now} | {status} |")
    as_now = {op: each for op, each in kept.items() if each["now"] == verified.source_digest(op)}
    lines += [""] if as_now else []
    for op, each in as_now.items():
        text = f"- {op}: the source changed since it was verified, but none of the {each['programs']} programs of its check cases of that"
        newer = f" {each['new']} programs of newer cases have not run on it." if each["new"] else ""
        lines.append(f"{text} time, as lowered for this device.{newer}")
    return "\n".join([*lines, "", f"Written by `{COMMAND}`.", ""])


def _status(found: str | None, now: str) -> str:
    if found is None:
        return "unverified: no run in which all of its cases passed"
    return "verified" if found == now else "unverified since its source changed"
