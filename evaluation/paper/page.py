"""All results of a folder on one HTML page that needs nothing else: tables, figures, and the settings that made them."""

import html
import json
from pathlib import Path

import markdown2

from eagle.files import replace_text

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 0 1rem 3rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
nav ul { columns: 18rem; padding-left: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .7rem; text-align: left; white-space: nowrap; }
figure { background: white; margin: 1rem 0; overflow-x: auto; } figure svg { height: auto; max-width: 100%; min-width: 40rem; }
pre { overflow-x: auto; background: #8881; padding: .7rem; font-size: .85rem; }
"""


def tables_as_html(text: str) -> str:
    """Markdown with wide tables that scroll by themselves, so that the page does not."""
    body = markdown2.markdown(
        text, extras=["tables", "code-friendly", "fenced-code-blocks"]
    )  # an underscore within a name is no emphasis
    for tag, wrapped in (
        ("<table>", '<div class="scroll"><table>'),
        ("</table>", "</table></div>"),
        ("<h1>", "<h2>"),
        ("</h1>", "</h2>"),
    ):
        body = body.replace(tag, wrapped)
    return body


def section(table: Path, results: Path) -> tuple[str, str]:
    """(anchor, HTML) of one table with its figures and its settings."""
    anchor = "-".join(table.relative_to(results).with_suffix("").parts)
    place = ", ".join(table.relative_to(results).parent.parts[1:])
    parts = [
        f'<section id="{html.escape(anchor)}">',
        tables_as_html(table.read_text(encoding="utf-8")),
        f"<p>{html.escape(place)}</p>",
    ]
    for picture in (table.with_suffix(".svg"), table.with_name(f"{table.stem}-calibration.svg")):
        if picture.exists():
            drawing = picture.read_text(encoding="utf-8")
            parts.append(f"<figure>{drawing[drawing.index('<svg') :]}</figure>")
    made = table.with_suffix(".json")
    content = json.loads(made.read_text(encoding="utf-8")) if made.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{made} names no settings: an older version wrote it; write the table again (python -m evaluation.paper.tables)"
        )
    if settings := content.get("settings"):
        parts.append(
            f"<details><summary>Settings</summary><pre>{html.escape(json.dumps(settings, indent=1))}</pre></details>"
        )
    return anchor, "\n".join([*parts, "</section>"])


def write_page(results: Path) -> Path:
    """Write ``index.html`` into the results folder; returns its path.

    Raises:
        ValueError: where the folder holds no tables.
    """
    tables = sorted(results.glob("*/*/**/*.md"))
    if not tables:
        raise ValueError(f"{results} holds no tables; python -m evaluation.experiment makes them")
    sections = [section(table, results) for table in tables]
    names = [", ".join(table.relative_to(results).with_suffix("").parts) for table in tables]
    links = "\n".join(
        f'<li><a href="#{html.escape(a)}">{html.escape(name)}</a></li>'
        for name, (a, _) in zip(names, sections)
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>RheoSampling: results</title><style>{STYLE}</style></head><body>\n<h1>RheoSampling on EAGLE-3: results</h1>\n"
        f"<nav><ul>{links}</ul></nav>\n"
        + "\n".join(text for _, text in sections)
        + "\n</body></html>\n"
    )
    replace_text(results / "index.html", page)
    return results / "index.html"
