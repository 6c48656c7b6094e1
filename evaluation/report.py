"""Compare answer files: ``python -m evaluation.report A.jsonl B.jsonl --baseline C.jsonl``.

For each question set and method it prints tau over all cycles, tokens per second, and the speedup
over the baseline, each with a 95 % interval clustered by question. It writes the same as JSON.
Files that differ only in the seed are one method.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from eagle.files import replace_text
from eagle.program import program
from evaluation.common.answer_file import read_answers, totals
from evaluation.common.markdown import table
from evaluation.common.statistics import Estimate, ratio, ratio_of_ratios
from evaluation.paper.page import write_page

# Settings that a run must share with its baseline.
SHARED_KEYS = (
    "base_model_path",
    "template",
    "num_choices",
    "temperature",
    "filters",
    "max_new_token",
    "dtype",
    "device",
    "threads",
)
# All settings that tell methods apart.
METHOD_KEYS = (
    "sampling",
    "m",
    "support",
    "verification",
    "normaliser",
    "total_token",
    "depth",
    "top_k",
    "ea_model_path",
    "head",
    *SHARED_KEYS,
)


def method_of(record: dict) -> tuple[str, str]:
    """The question set of a record, and its method: the settings of ``METHOD_KEYS`` as JSON."""
    run = record.get("run") or {}
    settings = {key: run[key] for key in METHOD_KEYS if key in run}
    return run.get("bench_name", "?"), json.dumps(settings | {"model_id": record["model_id"]})


def label_of(method: str) -> str:
    """A short name of a method: how it drafts and verifies."""
    run = json.loads(method)
    sampling = run.get("sampling")
    if sampling is None:
        return run["model_id"]
    if sampling == "none":
        return "plain"
    tree = f"{run['total_token']}x{run['depth']}"
    if sampling == "topk":
        return f"topk {tree}"
    parts = [f"rheo m={run['m']}"]
    if run["verification"] != "rheo":
        parts.append(run["verification"])
    if run["support"] != 128:
        parts.append(f"support {run['support']}")
    if run.get("normaliser", "support") != "support":
        parts.append(f"{run['normaliser']} softmax")
    return " ".join([*parts, tree])


def labels(methods: list[str]) -> dict[str, str]:
    """Different names for different methods.

    Methods with the same short name get the settings in which they differ added, and their
    model_id if they differ in nothing else.
    """
    found = {}
    for method in methods:
        name, run = label_of(method), json.loads(method)
        alike = [json.loads(other) for other in methods if label_of(other) == name]
        differing = [k for k in METHOD_KEYS if any(other.get(k) != run.get(k) for other in alike)]
        found[method] = name + "".join(f", {k} {run.get(k)}" for k in differing)
    names = list(found.values())
    return {
        method: name
        if names.count(name) == 1
        else f"{name}, model_id {json.loads(method)['model_id']}"
        for method, name in found.items()
    }


def phase_seconds(records: list[dict]) -> dict[str, float]:
    """Mean seconds per cycle of each phase; for prefill, per turn."""
    phases, cycles, turns = defaultdict(float), 0, 0
    for record in records:
        for choice in record["choices"]:
            cycles += sum(map(len, choice.get("accept_lengths", [])))
            for turn in choice.get("seconds", []):
                turns += 1
                for phase, seconds in turn.items():
                    phases[phase] += seconds
    return {p: s / max(turns if p == "prefill" else cycles, 1) for p, s in phases.items()}


def by_method(files: list[Path]) -> dict[tuple[str, str], list[dict]]:
    """Records by question set and method.

    Raises:
        ValueError: if a question is answered twice with one seed.
    """
    methods: dict[tuple[str, str], list[dict]] = defaultdict(list)
    seen = set()
    for record in read_answers(files):
        key, question = method_of(record), record["question_id"]
        seed = (record.get("run") or {}).get("seed")
        if (key, question, seed) in seen:
            raise ValueError(
                f"question {question!r} of {label_of(key[1])} is answered twice with seed {seed}"
            )
        seen.add((key, question, seed))
        methods[key].append(record)
    return methods


def matching_baseline(
    bench: str, settings: dict, baseline: dict[tuple[str, str], list[dict]]
) -> list[dict]:
    """The baseline's records that a method is compared to: same question set, same settings.

    Args:
        bench: the question set.
        settings: of the method.
        baseline: records by question set and method.

    Raises:
        ValueError: if no run fits, or several do.
    """
    candidates = {method: records for (name, method), records in baseline.items() if name == bench}
    if not candidates:
        have = ", ".join(sorted({name for name, _ in baseline})) or "none"
        raise ValueError(f"the baseline has no answers to {bench!r}; it has {have}")
    fitting, differences = [], []
    for method, records in candidates.items():
        other = json.loads(method)
        differing = [key for key in SHARED_KEYS if other.get(key) != settings.get(key)]
        for key in differing:
            differences.append(f"{key} {other.get(key)!r} against {settings.get(key)!r}")
        if not differing:
            fitting.append(records)
    if not fitting:
        raise ValueError(f"the baseline of {bench!r} differs in {', '.join(differences)}")
    if len(fitting) > 1:
        raise ValueError(f"the baseline of {bench!r} has several runs that fit; give one")
    return fitting[0]


def build_report(files: list[Path], baseline: list[Path]) -> list[dict]:
    """One row for each question set and method.

    Args:
        files: answer files of the runs.
        baseline: answer files of plain decoding; none leaves out the speedup.

    Raises:
        ValueError: if the baseline lacks a question set or questions of a run, or was made with
            other settings.
    """
    methods, plain_methods = by_method(files), by_method(baseline)
    names = labels(list(dict.fromkeys(method for _, method in methods)))
    rows = []
    for (bench, method), records in methods.items():
        settings, run = json.loads(method), totals(records)
        speedup = None
        if baseline:
            plain = totals(matching_baseline(bench, settings, plain_methods))
            missing = sorted(map(str, run["tokens"].keys() - plain["tokens"].keys()))
            if missing:
                raise ValueError(
                    f"the baseline lacks {len(missing)} questions of {bench!r}: "
                    f"{', '.join(missing[:10])}"
                )
            speedup = ratio_of_ratios(
                run["tokens"], run["seconds"], plain["tokens"], plain["seconds"]
            )
        row = {
            "bench": bench,
            "method": names[method],
            "settings": settings,
            "seeds": sorted({(record.get("run") or {}).get("seed", 0) for record in records}),
            "cycles": int(sum(run["cycles"].values())),
            "new_tokens": int(sum(run["tokens"].values())),
            "tau": ratio(run["accepted"], run["cycles"]),
            "tokens_per_sec": ratio(run["tokens"], run["seconds"]),
            "speedup": speedup,
            "phase_sec": phase_seconds(records),
        }
        rows.append(row)
    return rows


def show_interval(estimate: Estimate | None) -> str:
    """An estimate as ``value [low, high]``; a dash for None."""
    if estimate is None:
        return "-"
    if estimate.low is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def render(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    estimates = {
        "tau [95 %]": "tau",
        "tokens/s [95 %]": "tokens_per_sec",
        "speedup [95 %]": "speedup",
    }
    lines = []
    for row in rows:
        questions = row["tokens_per_sec"].questions if row["tokens_per_sec"] else 0
        values = [show_interval(row[key]) for key in estimates.values()]
        lines.append([row["bench"], row["method"], questions, len(row["seeds"]), *values])
    return table(["bench", "method", "questions", "seeds", *estimates], lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.report",
        description="Compare answer files, or gather all results on one page.",
    )
    add = parser.add_argument
    plain = "answer files of plain decoding"
    output = "JSON file; default: report.json beside the first answer file"
    page = "gather all tables and figures of this folder on one page instead"
    add("answers", type=Path, nargs="*", help="answer files of the runs to report")
    add("--baseline", type=Path, nargs="+", default=[], help=plain)
    add("--output", type=Path, help=output)
    add("--html", type=Path, metavar="RESULTS", help=page)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Print and write the report, or write the page."""
    if args.html is not None:
        print(write_page(args.html))
        return
    if not args.answers:
        raise ValueError("no answer files are given")
    rows = build_report(args.answers, args.baseline)
    output = args.output or args.answers[0].with_name("report.json")
    print(render(rows))
    replace_text(output, json.dumps(rows, default=asdict, indent=1) + "\n")
    print(
        "tau: accepted + 1 per cycle, over all cycles. Intervals: 95 %, clustered by question. "
        f"The same as JSON: {output}"
    )


if __name__ == "__main__":
    main()
