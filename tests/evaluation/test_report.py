"""Comparing answer files: tau, speedups, matching baselines, names of methods."""

import json

import pytest

from evaluation import report
from evaluation.common.answer_file import read_answers


def record_of(question, lengths):
    """A record of plain keys: one turn whose cycles have these accept lengths."""
    choice = {
        "turns": ["x"],
        "new_tokens": [sum(lengths)],
        "wall_time": [1.0],
        "accept_lengths": [lengths],
    }
    run = {"bench_name": "b", "sampling": "none"}
    return {"question_id": question, "model_id": "m", "choices": [choice], "run": run}


def test_report_compares_runs_and_a_file_with_itself_gives_exactly_1(
    answer_questions, answer_plainly, tmp_path, capsys
):
    plain, topk, rheo = (tmp_path / f"{name}.jsonl" for name in ("plain", "topk", "rheo"))
    answer_plainly(plain)
    answer_questions(topk)
    answer_questions(rheo, "--sampling", "rheo", "--m", "0")
    capsys.readouterr()
    report.main([str(topk), str(rheo), "--baseline", str(plain)])
    table = capsys.readouterr().out
    assert "topk 8x2" in table and "rheo m=0" in table and "tinybench" in table
    row = json.loads((tmp_path / "report.json").read_text())[0]
    lengths = [
        n
        for record in read_answers([topk])
        for turn in record["choices"][0]["accept_lengths"]
        for n in turn
    ]
    assert row["tau"]["value"] == pytest.approx(sum(lengths) / len(lengths))
    assert row["cycles"] == len(lengths)
    for path in (plain, topk):
        same = report.build_report([path], [path])[0]["speedup"]
        assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)


def test_report_pools_seeds_and_refuses_a_baseline_without_the_questions(
    answer_questions, answer_plainly, tmp_path
):
    first, second, plain = (tmp_path / f"{name}.jsonl" for name in ("1", "2", "plain"))
    answer_questions(first, "--seed", "1")
    answer_questions(second, "--seed", "2")
    rows = report.build_report([first, second], [])
    assert len(rows) == 1 and rows[0]["seeds"] == [1, 2] and rows[0]["speedup"] is None
    answer_plainly(plain, "--question-end", "2")
    with pytest.raises(ValueError, match="lacks 3 questions of 'tinybench': 12, 13, 14"):
        report.build_report([first], [plain])


def test_report_refuses_a_baseline_of_other_settings_and_a_file_given_twice(
    answer_questions, answer_plainly, tmp_path
):
    answer_questions(tmp_path / "run.jsonl")
    answer_plainly(tmp_path / "other.jsonl", "--temperature", "0.5")
    with pytest.raises(ValueError, match="temperature 0.5 against 1.0"):
        report.build_report([tmp_path / "run.jsonl"], [tmp_path / "other.jsonl"])
    with pytest.raises(ValueError, match="question 10 of topk 8x2 is answered twice with seed 0"):
        report.build_report([tmp_path / "run.jsonl"] * 2, [])


@pytest.mark.parametrize("lengths, tau", [([4, 1, 3], 8 / 3), ([2], 2.0), ([], None)])
def test_tau_is_the_mean_of_accepted_plus_1_and_undefined_without_cycles(tmp_path, lengths, tau):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record_of(1, lengths)) + "\n")
    row = report.build_report([path], [path])[0]
    assert (row["tau"] and row["tau"].value) == tau
    report.render([row])


def test_methods_of_the_same_short_name_are_told_apart_by_what_differs():
    base = {
        "sampling": "rheo",
        "m": 1,
        "support": 128,
        "verification": "rheo",
        "normaliser": "support",
        "total_token": 60,
        "depth": 7,
    }
    names = {
        "rheo m=1 60x7, head x, model_id a": {"model_id": "a", "head": "x"},
        "rheo m=1 60x7, head x, model_id b": {"model_id": "b", "head": "x"},
        "rheo m=1 60x7, head y": {"model_id": "a", "head": "y"},
        "rheo m=2 60x7": {"model_id": "a", "m": 2},
        "rheo m=1 full softmax 60x7": {"model_id": "a", "normaliser": "full"},
    }
    methods = [json.dumps(base | more) for more in names.values()]
    assert list(report.labels(methods).values()) == list(names)
