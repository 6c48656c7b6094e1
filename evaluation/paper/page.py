"""All results of a folder on one HTML page: tables, plots, and the settings that made them.

The page links to the plots that lie beside it, so it stays small and must stay in its folder.
"""

import html
import json
from pathlib import Path

from eagle.files import replace_text

# The main results first, then the paper's order; all other folders follow in the alphabet's.
ORDER = ("table2", "figure3", "table1", "table3", "table4", "table5", "figure4")

STYLE = """
:root { color-scheme: light dark; }
body {
  font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 0 1rem 3rem;
}
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
nav ul { columns: 18rem; padding-left: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td {
  border-bottom: 1px solid #8884; padding: .3rem .7rem; text-align: left; white-space: nowrap;
}
figure { margin: 1rem 0; overflow-x: auto; }
figure img { height: auto; max-width: 100%; min-width: 40rem; }
pre { overflow-x: auto; background: #8881; padding: .7rem; font-size: .85rem; }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>RheoSampling: results</title><style>{style}</style></head><body>
<h1>RheoSampling on EAGLE-3: results</h1>
<nav><ul>{links}</ul></nav>
{sections}
</body></html>
"""


def rank(table: Path, results: Path) -> tuple[int, Path]:
    """Sorts the tables of a results folder as ``ORDER`` says."""
    path = table.relative_to(results)
    return ORDER.index(path.parts[0]) if path.parts[0] in ORDER else len(ORDER), path


def tables_as_html(text: str) -> str:
    """Markdown as HTML; wide tables scroll in their own frames, so that the page does not."""
    import markdown2

    # "code-friendly": an underscore in a name is not emphasis.
    body = markdown2.markdown(text, extras=["tables", "code-friendly", "fenced-code-blocks"])
    body = body.replace("<table>", '<div class="scroll"><table>')
    body = body.replace("</table>", "</table></div>")
    return body.replace("<h1>", "<h2>").replace("</h1>", "</h2>")


def settings_of(table: Path) -> dict | None:
    """The settings in the JSON file beside a table; None if it has none."""
    path = table.with_suffix(".json")
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} names no settings: an older version wrote it; "
            "write the table again (python -m evaluation.paper.tables)"
        )
    return content.get("settings")


def section(table: Path, results: Path, anchor: str) -> str:
    """One table with its plots and settings, as HTML."""
    path = table.relative_to(results)
    parts = [
        f'<section id="{html.escape(anchor)}">',
        tables_as_html(table.read_text(encoding="utf-8")),
        f"<p>{html.escape(', '.join(path.parts[1:-1]))}</p>",
    ]
    for name in (table.stem, f"{table.stem}-calibration"):
        plot = path.with_name(f"{name}.png")
        if (results / plot).exists():
            source, label = html.escape(plot.as_posix()), html.escape(name)
            parts.append(f'<figure><img src="{source}" alt="{label}" loading="lazy"></figure>')
    if settings := settings_of(table):
        text = html.escape(json.dumps(settings, indent=1))
        parts.append(f"<details><summary>Settings</summary><pre>{text}</pre></details>")
    return "\n".join([*parts, "</section>"])


def write_page(results: Path) -> Path:
    """Write ``index.html`` into the results folder; returns its path.

    Raises:
        ValueError: if the folder holds no tables.
    """
    tables = sorted(results.glob("*/*/**/*.md"), key=lambda table: rank(table, results))
    if not tables:
        raise ValueError(f"{results} holds no tables; python -m evaluation.experiment makes them")
    links, sections = [], []
    for table in tables:
        names = table.relative_to(results).with_suffix("").parts
        anchor, label = "-".join(names), html.escape(", ".join(names))
        links.append(f'<li><a href="#{html.escape(anchor)}">{label}</a></li>')
        sections.append(section(table, results, anchor))
    page = PAGE.format(style=STYLE, links="\n".join(links), sections="\n".join(sections))
    replace_text(results / "index.html", page)
    return results / "index.html"
