"""A document of headings, text, tables and charts, as Markdown and as one self-contained HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jaxllm.scaling.plots import Plot
from jaxllm.scaling.tables import Table, as_markdown

PLOTS_FOLDER = "plots"
STYLE = """
:root { color-scheme: light dark; --line: #8884; --shade: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; } p, ul { max-width: 56rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .22rem .65rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } td.text, th.text { text-align: left; white-space: normal; } tbody tr:hover { background: var(--shade); }
.plots { display: flex; flex-wrap: wrap; gap: 1.2rem; } .plots figure { margin: 0; max-width: 100%; overflow-x: auto; }
svg { max-width: none; } pre { overflow-x: auto; background: var(--shade); padding: .7rem; font-size: 12.5px; }
"""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Points:
    """A list."""

    lines: list[str]


@dataclass(frozen=True)
class Folded:
    """Lines for readers who want details."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Charts:
    """Charts beside each other."""

    plots: list[Plot]


Block = Heading | Text | Points | Folded | Charts | Table


def as_markdown_page(title: str, blocks: Sequence[Block]) -> str:
    """The document in Markdown; charts are files in PLOTS_FOLDER."""
    parts = [f"# {title}"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Text(text):
                parts.append(text)
            case Points(lines):
                parts.append("\n".join(f"- {line}" for line in lines))
            case Folded(name, lines):
                parts.append("\n".join([f"{name}:", "", "```", *lines, "```"]))
            case Charts(plots):
                parts.append("\n".join(f"![{plot.name}]({PLOTS_FOLDER}/{plot.name}.svg)" for plot in plots))
            case Table():
                parts.append(as_markdown(block))
    return "\n\n".join(parts) + "\n"


def as_html_page(title: str, blocks: Sequence[Block]) -> str:
    """The document as HTML with its style and charts in it."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{escape(text)}</h2>")
            case Text(text):
                parts.append(f"<p>{escape(text)}</p>")
            case Points(lines):
                parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
            case Folded(name, lines):
                parts.append(f"<details><summary>{escape(name)}</summary><pre>{escape(chr(10).join(lines))}</pre></details>")
            case Charts(plots):
                figures = "".join(f'<figure id="{escape(plot.name)}">{plot.svg}</figure>' for plot in plots)
                parts.append(f'<div class="plots">{figures}</div>')
            case Table():
                parts.append(_table(block))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _table(table: Table) -> str:
    # Words stand left, numbers right.
    is_text = [
        any(line[i] for line in table.lines) and all(not line[i][:1].isdigit() and line[i] != "–" for line in table.lines)
        for i in range(len(table.header))
    ]

    def row(cells: Sequence[str], tag: str) -> str:
        marked = zip(cells, (' class="text"' if text else "" for text in is_text), strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in marked) + "</tr>"

    body = "".join(row(line, "td") for line in table.lines)
    return f'<div class="table"><table><thead>{row(table.header, "th")}</thead><tbody>{body}</tbody></table></div>'
