"""A table as Markdown, CSV and JSON files."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path

from eagle.files import replace_text
from evaluation.common.statistics import Estimate


def write_table(output: Path, text: str, rows: list[dict], settings: dict, **more) -> None:
    """Write a table and the settings that it was made with, and print it.

    Args:
        output: path of the files without their ending.
        text: the table as Markdown.
        rows: its rows, with numbers that are not rounded; values may be Estimates.
        settings: the settings.
        more: further entries of the JSON file.
    """
    shown = {
        key: " ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in settings.items()
        if not isinstance(value, dict)
    }
    line = ", ".join(f"{key} {value}" for key, value in shown.items())
    content = json.dumps({"settings": settings, "rows": rows, **more}, indent=1, default=asdict)
    replace_text(output.with_name(f"{output.name}.md"), f"{text}\nSettings: {line}\n")
    replace_text(output.with_name(f"{output.name}.csv"), as_csv(rows))
    replace_text(output.with_name(f"{output.name}.json"), f"{content}\n")
    print(text)
    print(f"The same as CSV and JSON, with all settings: {output.parent}")


def as_csv(rows: list[dict]) -> str:
    """Rows as CSV. An estimate takes three columns (value, low, high); None leaves them empty."""
    estimates = {name for row in rows for name, value in row.items() if isinstance(value, Estimate)}
    flat = []
    for row in rows:
        line = {}
        for name, value in row.items():
            if name in estimates:
                ends = (value.value, value.low, value.high) if value else (None, None, None)
                line |= dict(zip((name, f"{name}_low", f"{name}_high"), ends))
            else:
                line[name] = value
        flat.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, flat[0])
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
