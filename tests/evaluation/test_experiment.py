"""Running the paper's experiments on a tiny pair: cells, parts, processes, resuming."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from evaluation.common.answer_file import read_answers
from evaluation.paper import coverage, experiment, grids, one_level, results, tables
from evaluation.paper.study import study_folder


def without_times(records):
    """Question ids and choices, sorted, without what differs from run to run."""
    times = ("wall_time", "seconds")
    answers = {
        record["question_id"]: [
            {key: value for key, value in choice.items() if key not in times}
            for choice in record["choices"]
        ]
        for record in records
    }
    return sorted(answers.items())


def answers_in(cell):
    return without_times(read_answers(cell.glob("*.jsonl")))


def test_answers_of_two_dtypes_lie_in_different_folders(run, capsys):
    plain = run("table3", "--bench-name qa --seeds 1")
    run("table3", "--bench-name qa --seeds 1 --dtype bf16")
    other = plain.parents[1] / "demo-bf16/cap6"
    for folder, dtype in ((plain, "float32"), (other, "bfloat16")):
        records = read_answers(folder.glob("qa/*/*.jsonl"))
        assert len(records) == 9 and {record["run"]["dtype"] for record in records} == {dtype}
    capsys.readouterr()
    flags = f"--pair demo --dtype bf16 --max-new-token 6 --results {plain.parents[2]}"
    tables.main(["table3", *flags.split()])
    assert f"{other}" in capsys.readouterr().out


def test_parts_together_are_the_whole_and_a_resumed_run_repeats_nothing(
    run, tmp_path, monkeypatch, capsys
):
    whole = run("table3", "--bench-name qa sum --seeds 1")
    made = []
    original = experiment.answer
    monkeypatch.setattr(experiment, "answer", lambda *args: made.append(1) or original(*args))
    for part in ("1/2", "2/2", "2/2"):
        parts = run("table3", f"--bench-name qa sum --seeds 1 --part {part}", tmp_path / "parts")
    assert len(made) == 2 * 3 * 3
    assert "0 answers made" in capsys.readouterr().out
    tables.main(f"table3 --pair demo --max-new-token 6 --results {tmp_path / 'parts'}".split())
    for bench in ("qa", "sum"):
        for cell in ("topk-T1-seed0", "rheo-m1-rrsw-T1-seed0", "rheo-m1-T1-seed0"):
            assert answers_in(whole / bench / cell) == answers_in(parts / bench / cell)

    def tau_column(folder):
        return [line.split(",")[6] for line in (folder / "table3.csv").read_text().splitlines()]

    assert tau_column(whole) == tau_column(parts) and tau_column(whole)[0] == "tau"


@pytest.mark.full
def test_processes_of_one_launch_divide_the_questions(run, paper_pair, tmp_path):
    whole = run("table3", "--bench-name qa --seeds 1")
    target, head, output = paper_pair / "target", paper_pair / "head", tmp_path / "launched"
    flags = f"--pair demo --limit 3 --max-new-token 6 --bench-name qa --seeds 1 --results {output}"
    script = tmp_path / "launched.py"
    script.write_text(
        "from evaluation.paper import experiment, grids\n"
        f'pair = grids.Pair("demo", {str(target)!r}, {str(head)!r}, "auto", "fp32")\n'
        'grids.PAIRS["demo"] = pair\n'
        f'experiment.main("table3 {flags}".split())\n'
    )
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    cell = output / "table3/demo/cap6/qa/rheo-m1-T1-seed0"
    assert sorted(path.name for path in cell.iterdir()) == ["1-of-2.jsonl", "2-of-2.jsonl"]
    assert answers_in(whole / "qa/rheo-m1-T1-seed0") == answers_in(cell)


def test_an_interrupted_run_continues_and_all_cells_answer_a_question_before_the_next(
    run, monkeypatch
):
    order = []
    original = experiment.answer

    def interrupted(model, request, question, block):
        if len(order) == 7:
            raise KeyboardInterrupt
        order.append((request.bench_name, question.question_id))
        return original(model, request, question, block)

    monkeypatch.setattr(experiment, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("table3", "--bench-name qa --seeds 1")
    assert order == [("qa", 0)] * 3 + [("qa", 1)] * 3 + [("qa", 2)]
    monkeypatch.setattr(experiment, "answer", original)
    folder = run("table3", "--bench-name qa --seeds 1")
    assert all(len(read_answers(cell.glob("*.jsonl"))) == 3 for cell in (folder / "qa").iterdir())


def test_numbers_that_leave_nothing_to_do_are_refused(run):
    with pytest.raises(SystemExit, match="--part is '3/2'"):
        run("table3", "--part 3/2")
    for flag in ("limit", "seeds"):
        with pytest.raises(SystemExit, match=f"--{flag} is 0"):
            run("table3", f"--{flag} 0")


def test_processes_divide_the_part_of_their_machine(monkeypatch):
    for index, expected in enumerate(((3, 9), (4, 9), (5, 9))):
        state = SimpleNamespace(num_processes=3, process_index=index)
        monkeypatch.setattr(experiment, "processes", lambda state=state: state)
        assert experiment.parse_part("2/3") == expected
        assert experiment.parse_part(None) == (index, 3)


def test_the_file_of_another_process_is_left_alone(run):
    flags, cut = "--bench-name qa --seeds 1", b'{"question_id": 2, "cho'
    folder = run("table3", f"{flags} --part 1/2")
    path = folder / "qa/topk-T1-seed0/1-of-2.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + cut)
    run("table3", f"{flags} --part 2/2")
    assert path.read_bytes() == whole + cut
    found = results.Results("table3", "demo", folder)  # the incomplete line does not count
    assert len(found.records["qa", grids.TOPK, 1.0]) == 3
    run("table3", f"{flags} --part 1/2")  # its own process removes the incomplete line
    assert path.read_bytes() == whole


def test_the_programs_of_one_table_take_the_same_arguments():
    arguments = (
        "--pair demo --dtype bf16 --bench-name qa sum --limit 2 --max-new-token 5 --seeds 1 "
        "--results somewhere"
    ).split()
    parsed = [
        program.build_parser().parse_args([*name, *arguments])
        for program, name in (
            (experiment, ["table5"]),
            (tables, ["table5"]),
            (coverage, []),
            (one_level, []),
        )
    ]
    assert len({str(study_folder(args, "table5")) for args in parsed}) == 1
    with pytest.raises(SystemExit):  # --seed is no abbreviation of --seeds
        experiment.build_parser().parse_args(["table2", "--seed", "1"])
