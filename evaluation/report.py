"""Compare answer files: ``python -m evaluation.report A.jsonl B.jsonl --baseline C.jsonl``.

Prints, per question set and method, tau over all cycles, tokens per second, and the speedup over the baseline, each
with a 95 % interval clustered by question, and writes the same as JSON. Files that differ in nothing but the
seed are one method.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from eagle.files import replace_text
from eagle.program import one_line_errors
from evaluation.common.answers import read_answers
from evaluation.common.statistics import Estimate, ratio, ratio_of_ratios
from evaluation.paper.page import write_page

# Settings that a run shares with its baseline, and those that tell its method from others on the same baseline.
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
    """(question set, all settings that tell methods apart, as JSON)."""
    run = record.get("run") or {}
    return run.get("bench_name", "?"), json.dumps(
        {k: run[k] for k in METHOD_KEYS if k in run} | {"model_id": record["model_id"]}
    )


def label_of(method: str) -> str:
    """A short name of a method: how it drafts and verifies."""
    run = json.loads(method)
    sampling = run.get("sampling")
    if sampling is None:
        return run["model_id"]
    if sampling == "none":
        return "plain"
    tree = f" {run['total_token']}x{run['depth']}"
    if sampling == "topk":
        return "topk" + tree
    extra = "" if run["verification"] == "rheo" else f" {run['verification']}"
    extra += "" if run["support"] == 128 else f" support {run['support']}"
    extra += (
        "" if run.get("normaliser", "support") == "support" else f" {run['normaliser']} softmax"
    )
    return f"rheo m={run['m']}{extra}{tree}"


def labels(methods: list[str]) -> dict[str, str]:
    """Names of some methods, each with whatever else tells it from another of the same short name."""
    found = {}
    for method in methods:
        run, alike = (
            json.loads(method),
            [json.loads(other) for other in methods if label_of(other) == label_of(method)],
        )
        differing = [k for k in METHOD_KEYS if any(other.get(k) != run.get(k) for other in alike)]
        found[method] = label_of(method) + "".join(f", {k} {run.get(k)}" for k in differing)
    # The name of a model tells methods apart only where their settings do not.
    shared = {name for name in found.values() if list(found.values()).count(name) > 1}
    return {
        method: f"{name}, model_id {json.loads(method)['model_id']}" if name in shared else name
        for method, name in found.items()
    }


def totals(records: list[dict]) -> dict[str, dict]:
    """Per quantity, sums by question id: accepted (+1), cycles, tokens, seconds, seconds of drafting."""
    sums: dict[str, dict] = {
        name: defaultdict(float) for name in ("accepted", "cycles", "tokens", "seconds", "drafting")
    }
    for record in records:
        question = record["question_id"]
        for choice in record["choices"]:
            lengths = [n for turn in choice.get("accept_lengths", []) for n in turn]
            for name, value in (
                ("accepted", sum(lengths)),
                ("cycles", len(lengths)),
                ("tokens", sum(choice["new_tokens"])),
                ("seconds", sum(choice["wall_time"])),
                ("drafting", sum(turn.get("draft", 0.0) for turn in choice.get("seconds", ()))),
            ):
                sums[name][question] += value
    return sums


def phase_seconds(records: list[dict]) -> dict[str, float]:
    """Mean seconds a cycle of each phase, prefill per turn."""
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
    """Records by question set and method; a question answered twice with one seed is an error."""
    methods: dict[tuple[str, str], list[dict]] = defaultdict(list)
    seen = set()
    for record in read_answers(files):
        key = (method_of(record), record["question_id"], (record.get("run") or {}).get("seed"))
        if key in seen:
            raise ValueError(
                f"question {record['question_id']!r} of {label_of(key[0][1])} stands twice with seed {key[2]}"
            )
        seen.add(key)
        methods[key[0]].append(record)
    return methods


def matching_baseline(
    bench: str, settings: dict, base: dict[tuple[str, str], list[dict]]
) -> list[dict]:
    """The baseline's records for a method: same question set, and the same settings that both have.

    Raises:
        ValueError: where there is none, or several.
    """
    candidates = {method: records for (name, method), records in base.items() if name == bench}
    if not candidates:
        have = ", ".join(sorted({name for name, _ in base})) or "none"
        raise ValueError(f"the baseline has no answers to {bench!r}; it has {have}")
    fitting, differences = [], []
    for method, records in candidates.items():
        other = json.loads(method)
        wrong = [
            f"{k} {other.get(k)!r} against {settings.get(k)!r}"
            for k in SHARED_KEYS
            if other.get(k) != settings.get(k)
        ]
        differences += wrong
        fitting += [] if wrong else [records]
    if len(fitting) != 1:
        why = (
            f"differs in {', '.join(differences)}"
            if not fitting
            else "has several runs that fit; give one"
        )
        raise ValueError(f"the baseline of {bench!r} {why}")
    return fitting[0]


def build_report(files: list[Path], baseline: list[Path]) -> list[dict]:
    """One row per question set and method.

    Raises:
        ValueError: where the baseline lacks a question set or questions of a run, or was made with other settings.
    """
    methods, base = by_method(files), by_method(baseline)

    rows, names = [], labels(list(dict.fromkeys(method for _, method in methods)))
    for (bench, method), records in methods.items():
        run = totals(records)
        speedup = None
        if baseline:
            plain = totals(matching_baseline(bench, json.loads(method), base))
            lacking = sorted(map(str, run["tokens"].keys() - plain["tokens"].keys()))
            if lacking:
                raise ValueError(
                    f"the baseline lacks {len(lacking)} questions of {bench!r}: {', '.join(lacking[:10])}"
                )
            speedup = ratio_of_ratios(
                run["tokens"], run["seconds"], plain["tokens"], plain["seconds"]
            )
        rows.append({
            "bench": bench,
            "method": names[method],
            "settings": json.loads(method),
            "seeds": sorted({(r.get("run") or {}).get("seed", 0) for r in records}),
            "cycles": int(sum(run["cycles"].values())),
            "new_tokens": int(sum(run["tokens"].values())),
            "tau": ratio(run["accepted"], run["cycles"]),
            "tokens_per_sec": ratio(run["tokens"], run["seconds"]),
            "speedup": speedup,
            "phase_sec": phase_seconds(records),
        })  # fmt: skip
    return rows


def show(estimate: Estimate | None) -> str:
    """``value [low, high]``, or a dash where there is nothing to estimate."""
    if estimate is None:
        return "-"
    if estimate.low is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def render(rows: list[dict]) -> str:
    """The rows as a Markdown table with aligned columns."""
    head = [
        "bench",
        "method",
        "questions",
        "seeds",
        "tau [95 %]",
        "tokens/s [95 %]",
        "speedup [95 %]",
    ]
    body = [
        [
            r["bench"],
            r["method"],
            str(r["tokens_per_sec"].questions if r["tokens_per_sec"] else 0),
            str(len(r["seeds"])),
        ]
        + [show(r[k]) for k in ("tau", "tokens_per_sec", "speedup")]
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        " | ".join(cell.ljust(w) for cell, w in zip(line, widths))
        for line in [head, ["-" * w for w in widths], *body]
    ]
    return "\n".join(f"| {line} |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("answers", type=Path, nargs="*", help="answer files of the runs to report")
    parser.add_argument(
        "--baseline", type=Path, nargs="+", default=[], help="answer files of plain decoding"
    )
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: report.json beside the first answer file"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="RESULTS",
        help="gather all tables and figures of this folder on one page instead",
    )
    args = parser.parse_args(argv)
    with one_line_errors():
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
        f"tau: accepted + 1 a cycle, over all cycles. Intervals: 95 %, clustered by question. The same as JSON: {output}"
    )


if __name__ == "__main__":
    main()
