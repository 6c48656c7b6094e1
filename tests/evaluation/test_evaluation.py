"""The command line on a tiny pair: answer files, resuming, flags, reports."""

import hashlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from support.tiny import save_pair, tiny_tokenizer

from eagle.model.ea_model import EaModel
from evaluation import report
from evaluation.checks import greedy as greedy_check
from evaluation.common import questions
from evaluation.common.answer_file import read_answers
from evaluation.common.answers import turn_seed
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import load_questions, question_file
from evaluation.common.statistics import ratio, ratio_of_ratios
from evaluation.gen_baseline_answer import main as plain_main
from evaluation.gen_ea_answer import main


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny pair on disk and a question file of five questions, one of two turns; the file lacks its last newline."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, 16)
    records = [
        {"question_id": 10 + i, "category": "c", "turns": [f"w{i} w2"] + ["w3"] * (i == 1)}
        for i in range(5)
    ]
    (folder / "tinybench").mkdir()
    (folder / "tinybench/question.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def arguments(pair, answer_file, *extra):
    return ["--base-model-path", f"{pair}/target", "--ea-model-path", f"{pair}/head", "--question-file",
            f"{pair}/tinybench/question.jsonl", "--answer-file", str(answer_file), "--max-new-token", "12", "--total-token", "8",
            "--depth", "2", "--top-k", "3", *extra]  # fmt: skip


def baseline_arguments(pair, answer_file, *extra):
    drop = {"--ea-model-path", "--total-token", "--depth", "--top-k"}
    args = arguments(pair, answer_file, *extra)
    return [a for i, a in enumerate(args) if a not in drop and args[i - 1] not in drop]


def texts(path):
    return {r["question_id"]: [c["turns"] for c in r["choices"]] for r in read_answers([path])}


def test_answer_file_has_eagles_keys_and_ours_and_the_echo_states_nodes_and_levels(
    pair, tmp_path, capsys
):
    path = tmp_path / "a.jsonl"
    main(arguments(pair, path, "--sampling", "rheo", "--m", "1", "--seed", "5"))
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
    for record in records:
        assert set(record) == {"question_id", "answer_id", "model_id", "choices", "tstamp", "run"}
        choice = record["choices"][0]
        turns = len(choice["turns"])
        assert turns == 2 if record["question_id"] == 11 else turns == 1
        for key in (
            "idxs",
            "new_tokens",
            "wall_time",
            "accept_lengths",
            "accepted_kinds",
            "survivals",
            "calibration",
            "stop_reasons",
            "seconds",
        ):
            assert len(choice[key]) == turns
        for turn in range(turns):
            assert choice["idxs"][turn] == len(choice["accept_lengths"][turn]) - 1
            assert choice["new_tokens"][turn] <= 12 and choice["wall_time"][turn] > 0
            assert [len(k) + 1 for k in choice["accepted_kinds"][turn]] == choice["accept_lengths"][
                turn
            ]
            for kinds, survivals in zip(
                choice["accepted_kinds"][turn], choice["survivals"][turn], strict=True
            ):
                assert (
                    set(survivals) <= {"0", "1"} and len(kinds) <= len(survivals) <= len(kinds) + 1
                )
            for kind, cells in choice["calibration"][turn].items():
                assert sum(accepted for _, _, accepted in cells) == "".join(
                    choice["accepted_kinds"][turn]
                ).count(kind[0])
                assert all(
                    accepted <= number
                    and place / 10 * number <= proxies <= (place + 1.001) / 10 * number
                    for place, (number, proxies, accepted) in enumerate(cells)
                )
            assert sum(cell[0] for cell in choice["calibration"][turn]["sampled"]) == "".join(
                choice["survivals"][turn]
            ).count("1")
    run = records[0]["run"]
    assert (
        run["sampling"] == "rheo"
        and run["m"] == 1
        and run["seed"] == 5
        and run["dtype"] == "float32"
    )
    assert {"versions", "commit", "device", "bench_name", "support", "verification"} <= set(run)


def test_fastchat_reads_the_answer_file(pair, tmp_path, monkeypatch):
    for client in ("openai", "anthropic"):  # clients of judges that reading needs not
        monkeypatch.setitem(sys.modules, client, types.ModuleType(client))
    from fastchat.llm_judge.common import load_model_answers

    main(arguments(pair, tmp_path / "tiny.jsonl"))
    assert set(load_model_answers(str(tmp_path))["tiny"]) == {10, 11, 12, 13, 14}


def test_resuming_and_splitting_change_nothing_and_a_cut_line_is_dropped(pair, tmp_path, capsys):
    extra = ("--sampling", "rheo", "--num-choices", "2")
    main(arguments(pair, tmp_path / "whole.jsonl", *extra))
    whole = texts(tmp_path / "whole.jsonl")
    main(arguments(pair, tmp_path / "parts.jsonl", *extra, "--question-begin", "3"))
    main(arguments(pair, tmp_path / "parts.jsonl", *extra, "--question-end", "2"))
    lines = (tmp_path / "parts.jsonl").read_bytes()
    (tmp_path / "parts.jsonl").write_bytes(lines[:-40])  # a kill in the middle of a write
    capsys.readouterr()
    main(arguments(pair, tmp_path / "parts.jsonl", *extra))
    out = capsys.readouterr().out
    assert "dropping a last line that was cut off" in out and "3 finished questions" in out
    assert texts(tmp_path / "parts.jsonl") == whole
    before = (tmp_path / "parts.jsonl").read_bytes()
    main(arguments(pair, tmp_path / "parts.jsonl", *extra))  # all done: nothing to do
    assert (tmp_path / "parts.jsonl").read_bytes() == before


def test_a_killed_run_keeps_its_finished_questions(pair, tmp_path):
    path = tmp_path / "killed.jsonl"
    command = [
        sys.executable,
        "-m",
        "evaluation.gen_ea_answer",
        *arguments(pair, path, "--num-choices", "200"),
    ]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(6000):
            if path.exists() and path.stat().st_size > 0:
                break
            try:
                process.wait(0.02)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        process.wait()
    content = path.read_bytes()
    assert content.count(b"\n") >= 1
    for line in content[: content.rfind(b"\n")].split(b"\n"):
        json.loads(line)


def test_answers_of_other_settings_are_never_mixed(pair, tmp_path):
    main(arguments(pair, tmp_path / "a.jsonl", "--question-end", "1"))
    with pytest.raises(SystemExit, match="another run .*seed 0 then, 1 now"):
        main(arguments(pair, tmp_path / "a.jsonl", "--seed", "1"))


@pytest.mark.parametrize(
    "flag, key, value",
    [
        (["--max-new-token", "5"], "max_new_token", 5),
        (["--temperature", "0.5"], "temperature", 0.5),
        (
            ["--filter-top-k", "4", "--filter-top-p", "0.9", "--filter-min-p", "0.1"],
            "filters",
            {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
        ),
        (["--dtype", "bf16"], "dtype", "bfloat16"),
        (["--seed", "9"], "seed", 9),
        (["--num-choices", "2"], "num_choices", 2),
        (["--total-token", "5"], "total_token", 5),
        (["--depth", "0"], "depth", 0),
        (["--top-k", "2"], "top_k", 2),
        (["--sampling", "rheo", "--m", "2"], "m", 2),
        (["--sampling", "rheo", "--m", "auto"], "m", "auto"),
        (["--sampling", "rheo", "--support", "6"], "support", 6),
        (["--sampling", "rheo", "--verification", "rrsw"], "verification", "rrsw"),
        (["--template", "llama-3.1"], "template", "llama-3.1"),
        (["--model-id", "name"], None, None),
    ],
)
def test_every_flag_is_honoured_and_recorded(pair, tmp_path, flag, key, value):
    main(arguments(pair, tmp_path / "a.jsonl", "--question-end", "1", *flag))
    record = read_answers([tmp_path / "a.jsonl"])[0]
    if key is not None:
        assert record["run"][key] == value
    if key == "max_new_token":
        assert record["choices"][0]["new_tokens"] == [5]
    if key == "num_choices":
        assert [c["index"] for c in record["choices"]] == [0, 1] and record["choices"][0][
            "turns"
        ] != record["choices"][1]["turns"]
    if key == "depth":
        assert max(record["choices"][0]["accept_lengths"][0]) <= 2
    if flag[0] == "--model-id":
        assert record["model_id"] == "name"


@pytest.mark.parametrize(
    "flag, message",
    [
        (["--m", "1"], "m=1 belongs to sampling 'rheo'"),
        (["--support", "9"], "support=9 belongs to sampling 'rheo'"),
        (["--verification", "rrsw"], "belongs to sampling 'rheo'"),
        (["--sampling", "rheo", "--m", "3"], "m is 3; with top_k 3"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--num-choices", "0"], "num-choices is 0"),
        (["--question-begin", "7"], "holds none of them"),
        (["--question-file", "nowhere/question.jsonl"], "nowhere/question.jsonl"),
    ],
)
def test_bad_flags_end_with_one_line_that_names_the_value(pair, tmp_path, flag, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments(pair, tmp_path / "a.jsonl", *flag))
    assert not (tmp_path / "a.jsonl").exists()


def test_an_m_that_is_no_number_is_named(pair, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(arguments(pair, tmp_path / "a.jsonl", "--sampling", "rheo", "--m", "two"))
    assert "m is 'two'; it must be a number or 'auto'" in capsys.readouterr().err


def test_seeds_of_turns_are_stable_and_distinct():
    assert (
        turn_seed(0, 81, 0, 0) == 2219011523335955954
    )  # the same on every machine and in every version
    seeds = {
        turn_seed(s, q, c, t)
        for s in range(3)
        for q in range(50)
        for c in range(2)
        for t in range(2)
    }
    assert len(seeds) == 600 and all(0 <= s < 2**63 for s in seeds)


def test_report_compares_runs_and_the_same_file_gives_exactly_1(pair, tmp_path, capsys):
    plain_main(baseline_arguments(pair, tmp_path / "plain.jsonl"))
    main(arguments(pair, tmp_path / "topk.jsonl"))
    main(arguments(pair, tmp_path / "rheo.jsonl", "--sampling", "rheo", "--m", "0"))
    capsys.readouterr()
    report.main(
        [
            str(tmp_path / "topk.jsonl"),
            str(tmp_path / "rheo.jsonl"),
            "--baseline",
            str(tmp_path / "plain.jsonl"),
        ]
    )
    table = capsys.readouterr().out
    assert "topk 8x2" in table and "rheo m=0" in table and "tinybench" in table
    rows = json.loads((tmp_path / "report.json").read_text())
    records = read_answers([tmp_path / "topk.jsonl"])
    lengths = [n for r in records for turn in r["choices"][0]["accept_lengths"] for n in turn]
    assert rows[0]["tau"]["value"] == pytest.approx(sum(lengths) / len(lengths)) and rows[0][
        "cycles"
    ] == len(lengths)
    for name in ("plain", "topk"):
        same = report.build_report([tmp_path / f"{name}.jsonl"], [tmp_path / f"{name}.jsonl"])[0][
            "speedup"
        ]
        assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)


def test_report_pools_seeds_and_refuses_a_baseline_without_the_questions(pair, tmp_path):
    for seed in ("1", "2"):
        main(arguments(pair, tmp_path / f"{seed}.jsonl", "--seed", seed))
    rows = report.build_report([tmp_path / "1.jsonl", tmp_path / "2.jsonl"], [])
    assert len(rows) == 1 and rows[0]["seeds"] == [1, 2] and rows[0]["speedup"] is None
    plain_main(baseline_arguments(pair, tmp_path / "plain.jsonl", "--question-end", "2"))
    with pytest.raises(ValueError, match="lacks 3 questions of 'tinybench': 12, 13, 14"):
        report.build_report([tmp_path / "1.jsonl"], [tmp_path / "plain.jsonl"])


def test_an_answer_with_a_line_separator_inside_is_one_line(tmp_path):
    record = answer(1, [2])
    record["choices"][0]["turns"] = ["a\u2028b\x85c"]
    (tmp_path / "a.jsonl").write_text(
        json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert read_answers([tmp_path / "a.jsonl"]) == [record]


def test_report_refuses_a_baseline_of_other_settings_and_a_file_given_twice(pair, tmp_path):
    main(arguments(pair, tmp_path / "run.jsonl"))
    plain_main(baseline_arguments(pair, tmp_path / "warm.jsonl", "--temperature", "0.5"))
    with pytest.raises(ValueError, match="temperature 0.5 against 1.0"):
        report.build_report([tmp_path / "run.jsonl"], [tmp_path / "warm.jsonl"])
    with pytest.raises(ValueError, match="question 10 of topk 8x2 stands twice with seed 0"):
        report.build_report([tmp_path / "run.jsonl"] * 2, [])


def test_a_run_goes_on_under_another_commit_and_with_the_tree_size_that_it_chose(
    pair, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "a.jsonl"
    choosing = "--total-token", "-1", "--depth", "-1"
    main(arguments(pair, path, "--question-end", "1", *choosing))
    text, run = (
        path.read_text().replace('"threads": 1', '"threads": 7'),
        read_answers([path])[0]["run"],
    )
    for name, other in (("total_token", 11), ("depth", 9)):
        text = text.replace(f'"{name}": {run[name]}', f'"{name}": {other}')
    path.write_text(text)
    main(arguments(pair, path, *choosing))
    assert "threads 7 then, 1 now" in capsys.readouterr().out
    assert {(r["run"]["total_token"], r["run"]["depth"]) for r in read_answers([path])} == {(11, 9)}


def answer(question, lengths, seconds=1.0):
    choice = {
        "turns": ["x"],
        "new_tokens": [sum(lengths)],
        "wall_time": [seconds],
        "accept_lengths": [lengths],
    }
    return {
        "question_id": question,
        "model_id": "m",
        "choices": [choice],
        "run": {"bench_name": "b", "sampling": "none"},
    }


def test_cycles_accepting_3_0_2_give_tau_8_over_3_and_one_cycle_or_none_divide_by_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    for records, tau in (
        ([answer(1, [4, 1, 3])], 8 / 3),
        ([answer(1, [2])], 2.0),
        ([answer(1, [])], None),
    ):
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        row = report.build_report([path], [path])[0]
        assert (row["tau"] and row["tau"].value) == tau
        report.render([row])


def test_interval_of_a_ratio_equals_its_literal_definition_and_covers():
    y, x = {1: 10.0, 2: 3.0, 3: 8.0}, {1: 5.0, 2: 2.0, 3: 3.0}
    estimate = ratio(y, x)
    r = 21 / 10
    variance = 3 / 2 * sum((y[k] - r * x[k]) ** 2 for k in y) / 10**2
    assert estimate.value == pytest.approx(r)
    assert estimate.high - estimate.value == pytest.approx(
        4.302652729696142 * variance**0.5
    )  # t, 2 degrees
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        counts = torch.randint(1, 9, (40,), generator=generator)
        sums = counts * 2.5 + torch.randn(40, generator=generator) * 3
        found = ratio(dict(enumerate(sums.tolist())), dict(enumerate(counts.tolist())))
        hits += found.low <= 2.5 <= found.high
    assert 360 <= hits <= 396  # 95 % of 400 is 380; 4.6 standard deviations either way


def test_ratio_of_ratios_is_paired_by_question():
    y, x = {1: 10.0, 2: 30.0}, {1: 5.0, 2: 6.0}
    double = {k: 2 * v for k, v in y.items()}
    estimate = ratio_of_ratios(double, x, y, x)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


def test_questions_are_checked(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a question"):
        load_questions(path)
    path.write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["b"]}')
    with pytest.raises(ValueError, match="line 2.*seen before"):
        load_questions(path)
    with pytest.raises(FileNotFoundError, match="no question set 'nothing'"):
        question_file("nothing")


def test_the_papers_sets_are_fetched_checked_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    with pytest.raises(
        FileNotFoundError,
        match="no question set 'qa': python -m evaluation.questions fetch gets it",
    ):
        question_file("qa")
    source = tmp_path / "eagle/data"
    (source / "qa").mkdir(parents=True)
    text = '{"question_id": 1, "category": "qa", "turns": ["Why?"]}'  # no newline after the last record, as in two of the six
    (source / "qa/question.jsonl").write_text(text)
    fetch = ["fetch", "qa", "--from", str(source)]
    with pytest.raises(SystemExit, match="is not the published question set: its SHA-256 is"):
        questions.main(fetch)
    assert not (tmp_path / "home").exists()  # nothing half-done stays
    monkeypatch.setitem(questions.SHA256, "qa", hashlib.sha256(text.encode()).hexdigest())
    questions.main(fetch)
    assert "qa: 1 questions" in capsys.readouterr().out
    assert load_questions(question_file("qa"))[0].turns == ("Why?",)
    (source / "qa/question.jsonl").unlink()
    questions.main(fetch)  # what is there is not asked for again
    (tmp_path / "home/rheosampling/qa/question.jsonl").write_text("damaged")
    with pytest.raises(SystemExit, match="question.jsonl"):
        questions.main(fetch)


def test_no_network_is_said_plainly(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(questions, "SOURCE", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match="cannot be reached .*give it with --from"):
        questions.main(["fetch", "sum"])
    with pytest.raises(SystemExit, match="unknown question sets: math; choose among alpaca"):
        questions.main(["fetch", "math"])


def test_the_demo_set_has_24_questions_of_six_kinds():
    demo = load_questions(question_file("demo"))
    assert len(demo) == 24 and len({q.category for q in demo}) == 6


def test_templates():
    tokenizer = tiny_tokenizer()
    ids = build_prompt("auto", tokenizer, ["w1", "w3"], ["w2"])
    assert (
        tokenizer.decode(ids[0]).split()
        == "<|user|> w1 <|end|> <|assistant|> w2 <|end|> <|user|> w3 <|end|> <|assistant|>".split()
    )
    spy = []

    class Recorder:
        def __call__(self, text):
            spy.append(text)
            return type("Encoding", (), {"input_ids": [1]})

    build_prompt("vicuna_v1.1", Recorder(), ["Hello", "More"], ["Hi"])
    assert spy[0].endswith("USER: Hello ASSISTANT: Hi</s>USER: More ASSISTANT:")
    with pytest.raises(
        ValueError, match="template is 'alpaca'; choose one of auto, llama-3.1, vicuna_v1.1"
    ):
        check_template("alpaca", tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        check_template("auto", tokenizer)


def test_greedy_check_tells_a_tie_from_a_fault(pair, capsys, monkeypatch):
    args = [
        "--base-model-path",
        f"{pair}/target",
        "--ea-model-path",
        f"{pair}/head",
        "--question-file",
        f"{pair}/tinybench/question.jsonl",
    ]
    with pytest.raises(SystemExit, match="0"):
        greedy_check.main(args)
    assert capsys.readouterr().out.count("identical") == 8
    naive = EaModel.naivegenerate

    def other(self, prompt, **kwargs):
        ids = naive(self, prompt, **kwargs)
        ids[0, -1] = (ids[0, -1] + 1) % 32
        return ids

    monkeypatch.setattr(EaModel, "naivegenerate", other)
    with pytest.raises(SystemExit, match="1"):
        greedy_check.main(args)
    assert "FAULT: first difference at new token" in capsys.readouterr().out
    monkeypatch.setattr(greedy_check, "top2_gap", lambda model, ids: 1e-7)
    with pytest.raises(SystemExit, match="0"):
        greedy_check.main(args)
    assert "tie: first difference" in capsys.readouterr().out


def test_arms_of_one_name_are_told_apart_by_what_differs():
    base = {
        "sampling": "rheo",
        "m": 1,
        "support": 128,
        "verification": "rheo",
        "normaliser": "support",
        "total_token": 60,
        "depth": 7,
    }
    methods = [base | more for more in (
        {"model_id": "a", "head": "x"}, {"model_id": "b", "head": "x"}, {"model_id": "a", "head": "y"}, {"model_id": "a", "m": 2},
        {"model_id": "a", "normaliser": "full"},
    )]  # fmt: skip
    assert list(report.labels([json.dumps(method) for method in methods]).values()) == [
        "rheo m=1 60x7, head x, model_id a", "rheo m=1 60x7, head x, model_id b", "rheo m=1 60x7, head y", "rheo m=2 60x7",
        "rheo m=1 full softmax 60x7",
    ]  # fmt: skip
