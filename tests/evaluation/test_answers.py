"""Answer files of the command line: their keys, resuming, flags, seeds."""

import ast
import json
import multiprocessing
import signal
import sys
import time
import types
from pathlib import Path

import pytest

import evaluation
from evaluation import gen_ea_answer
from evaluation.common.answer_file import read_answers
from evaluation.common.answers import turn_seed


def texts(path):
    return {r["question_id"]: [c["turns"] for c in r["choices"]] for r in read_answers([path])}


def check_turn(choice, turn):
    """The entries of one turn agree with each other."""
    lengths, kinds = choice["accept_lengths"][turn], choice["accepted_kinds"][turn]
    survivals, calibration = choice["survivals"][turn], choice["calibration"][turn]
    assert choice["idxs"][turn] == len(lengths) - 1
    assert choice["new_tokens"][turn] <= 12 and choice["wall_time"][turn] > 0
    assert [len(of_cycle) + 1 for of_cycle in kinds] == lengths
    for of_cycle, visited in zip(kinds, survivals, strict=True):
        assert set(visited) <= {"0", "1"}
        assert len(of_cycle) <= len(visited) <= len(of_cycle) + 1
    for kind, cells in calibration.items():
        assert sum(accepted for _, _, accepted in cells) == "".join(kinds).count(kind[0])
        for i, (number, proxies, accepted) in enumerate(cells):
            assert accepted <= number
            assert i / 10 * number <= proxies <= (i + 1.001) / 10 * number
    assert sum(cell[0] for cell in calibration["sampled"]) == "".join(survivals).count("1")


def test_answer_file_has_eagles_keys_and_ours(answer_questions, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    answer_questions(path, "--sampling", "rheo", "--m", "1", "--seed", "5")
    echo = capsys.readouterr().out
    for part in (
        "7 drafted nodes",
        "at most 3 levels",
        "float32",
        "template auto",
        "seed 5",
        "at most 12 new tokens",
        "m 1",
    ):
        assert part in echo
    records = read_answers([path])
    assert [r["question_id"] for r in records] == [10, 11, 12, 13, 14]
    per_turn = {
        "turns",
        "idxs",
        "new_tokens",
        "wall_time",
        "accept_lengths",
        "accepted_kinds",
        "survivals",
        "calibration",
        "stop_reasons",
        "seconds",
    }
    for record in records:
        assert set(record) == {"question_id", "answer_id", "model_id", "choices", "tstamp", "run"}
        choice = record["choices"][0]
        turns = 2 if record["question_id"] == 11 else 1
        assert set(choice) == per_turn | {"index"}
        assert all(len(choice[key]) == turns for key in per_turn)
        for turn in range(turns):
            check_turn(choice, turn)
    run = records[0]["run"]
    assert (run["sampling"], run["m"], run["seed"], run["dtype"]) == ("rheo", 1, 5, "float32")
    assert {"versions", "commit", "device", "bench_name", "support", "verification"} <= set(run)


def test_fastchat_reads_the_answer_file(answer_questions, tmp_path, monkeypatch):
    pytest.importorskip("fastchat")
    for client in ("openai", "anthropic"):  # clients of judges; reading does not need them
        monkeypatch.setitem(sys.modules, client, types.ModuleType(client))
    from fastchat.llm_judge.common import load_model_answers

    answer_questions(tmp_path / "tiny.jsonl")
    assert set(load_model_answers(str(tmp_path))["tiny"]) == {10, 11, 12, 13, 14}


def test_fastchat_and_markdown2_are_imported_only_inside_functions():
    for file in Path(evaluation.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                source = ast.unparse(node)
                assert "fastchat" not in source and "markdown2" not in source, file


def test_resuming_and_splitting_change_no_answer(answer_questions, tmp_path, capsys):
    flags = ("--sampling", "rheo", "--num-choices", "2")
    parts = tmp_path / "parts.jsonl"
    answer_questions(tmp_path / "whole.jsonl", *flags)
    whole = texts(tmp_path / "whole.jsonl")
    answer_questions(parts, *flags, "--question-begin", "3")
    answer_questions(parts, *flags, "--question-end", "2")
    parts.write_bytes(parts.read_bytes()[:-40])  # as if killed in the middle of a write
    capsys.readouterr()
    answer_questions(parts, *flags)
    out = capsys.readouterr().out
    assert "dropping an incomplete last line" in out and "3 finished questions" in out
    assert texts(parts) == whole
    before = parts.read_bytes()
    answer_questions(parts, *flags)  # nothing is left to do
    assert parts.read_bytes() == before


def test_a_killed_run_keeps_its_finished_questions(ea_arguments, tmp_path):
    path = tmp_path / "killed.jsonl"
    process = multiprocessing.get_context("fork").Process(
        target=gen_ea_answer.main, args=(ea_arguments(path, "--num-choices", "20"),)
    )
    process.start()
    try:
        deadline = time.monotonic() + 120
        while process.is_alive() and time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > 0:
                break
            time.sleep(0.005)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    content = path.read_bytes()
    assert content.count(b"\n") >= 1
    for line in content[: content.rfind(b"\n")].split(b"\n"):
        json.loads(line)


def test_answers_of_other_settings_are_never_mixed(answer_questions, tmp_path):
    answer_questions(tmp_path / "a.jsonl", "--question-end", "1")
    with pytest.raises(SystemExit, match="another run .*seed 0 then, 1 now"):
        answer_questions(tmp_path / "a.jsonl", "--seed", "1")


@pytest.mark.parametrize(
    "flags, key, value",
    [
        ("--max-new-token 5", "max_new_token", 5),
        ("--temperature 0.5", "temperature", 0.5),
        (
            "--filter-top-k 4 --filter-top-p 0.9 --filter-min-p 0.1",
            "filters",
            {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
        ),
        ("--dtype bf16", "dtype", "bfloat16"),
        ("--seed 9", "seed", 9),
        ("--num-choices 2", "num_choices", 2),
        ("--total-token 5", "total_token", 5),
        ("--depth 0", "depth", 0),
        ("--top-k 2", "top_k", 2),
        ("--sampling rheo --m 2", "m", 2),
        ("--sampling rheo --m auto", "m", "auto"),
        ("--sampling rheo --support 6", "support", 6),
        ("--sampling rheo --verification rrsw", "verification", "rrsw"),
        ("--template llama-3.1", "template", "llama-3.1"),
        ("--model-id name", None, None),
    ],
)
def test_every_flag_is_honoured_and_recorded(answer_questions, tmp_path, flags, key, value):
    answer_questions(tmp_path / "a.jsonl", "--question-end", "1", *flags.split())
    record = read_answers([tmp_path / "a.jsonl"])[0]
    choices = record["choices"]
    if key is not None:
        assert record["run"][key] == value
    if key == "max_new_token":
        assert choices[0]["new_tokens"] == [5]
    if key == "num_choices":
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["turns"] != choices[1]["turns"]
    if key == "depth":
        assert max(choices[0]["accept_lengths"][0]) <= 2
    if key is None:
        assert record["model_id"] == "name"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--m 1", "m=1 belongs to sampling 'rheo'"),
        ("--support 9", "support=9 belongs to sampling 'rheo'"),
        ("--verification rrsw", "belongs to sampling 'rheo'"),
        ("--sampling rheo --m 3", "m is 3; with top_k 3"),
        ("--dtype int8", "dtype is 'int8'"),
        ("--num-choices 0", "num-choices is 0"),
        ("--question-begin 7", "holds none of them"),
        ("--question-file nowhere/question.jsonl", "nowhere/question.jsonl"),
    ],
)
def test_bad_flags_end_with_one_line_that_names_the_value(
    answer_questions, tmp_path, flags, message
):
    with pytest.raises(SystemExit, match=message):
        answer_questions(tmp_path / "a.jsonl", *flags.split())
    assert not (tmp_path / "a.jsonl").exists()


def test_an_m_that_is_no_number_is_named(answer_questions, tmp_path, capsys):
    with pytest.raises(SystemExit):
        answer_questions(tmp_path / "a.jsonl", "--sampling", "rheo", "--m", "two")
    assert "m is 'two'; it must be " in capsys.readouterr().err


def test_seeds_of_turns_are_stable_and_distinct():
    assert turn_seed(0, 81, 0, 0) == 2219011523335955954  # on every machine, in every version
    seeds = {
        turn_seed(seed, question, choice, turn)
        for seed in range(3)
        for question in range(50)
        for choice in range(2)
        for turn in range(2)
    }
    assert len(seeds) == 600 and all(0 <= seed < 2**63 for seed in seeds)


def test_an_answer_with_a_line_separator_inside_is_one_line(tmp_path):
    choice = {"turns": ["a\u2028b\x85c"], "new_tokens": [2]}
    record = {"question_id": 1, "choices": [choice]}
    text = json.dumps(record, ensure_ascii=False) + "\n"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    assert read_answers([tmp_path / "a.jsonl"]) == [record]


def test_a_run_continues_after_a_git_commit_with_the_tree_sizes_that_it_chose(
    answer_questions, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, choosing = tmp_path / "a.jsonl", ("--total-token", "-1", "--depth", "-1")
    answer_questions(path, "--question-end", "1", *choosing)
    run = read_answers([path])[0]["run"]
    text = path.read_text().replace('"threads": 1', '"threads": 7')
    for name, other in (("total_token", 11), ("depth", 9)):
        text = text.replace(f'"{name}": {run[name]}', f'"{name}": {other}')
    path.write_text(text + '{"question_id": 11, "cho')  # as if killed in the middle of a write
    answer_questions(path, *choosing)
    assert "threads 7 then, 1 now" in capsys.readouterr().out
    assert {(r["run"]["total_token"], r["run"]["depth"]) for r in read_answers([path])} == {(11, 9)}
