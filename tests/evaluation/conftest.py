"""Fixtures of the evaluation tests: tiny pairs on disk, with tiny question sets."""

import json

import pytest
from support.tiny import save_pair

from evaluation import gen_baseline_answer, gen_ea_answer
from evaluation.paper import experiment, grids


def write_questions(folder, records):
    """Write ``question.jsonl``, without a line end after the last record."""
    folder.mkdir(parents=True)
    (folder / "question.jsonl").write_text("\n".join(map(json.dumps, records)))


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A folder with a target, a head and a set of five questions; one of them has two turns."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, 16)
    turns = [[f"w{i} w2"] + ["w3"] * (i == 1) for i in range(5)]
    records = [
        {"question_id": 10 + i, "category": "c", "turns": of_question}
        for i, of_question in enumerate(turns)
    ]
    write_questions(folder / "tinybench", records)
    return folder


@pytest.fixture(scope="session")
def ea_arguments(pair):
    """The arguments of ``gen_ea_answer`` for an answer file and further flags."""
    base = (
        f"--base-model-path {pair}/target --question-file {pair}/tinybench/question.jsonl "
        f"--max-new-token 12 --ea-model-path {pair}/head --total-token 8 --depth 2 --top-k 3"
    )
    return lambda answer_file, *flags: [*base.split(), "--answer-file", str(answer_file), *flags]


@pytest.fixture(scope="session")
def answer_questions(ea_arguments):
    """Answer the questions with speculative decoding."""
    return lambda answer_file, *flags: gen_ea_answer.main(ea_arguments(answer_file, *flags))


@pytest.fixture(scope="session")
def answer_plainly(pair):
    """Answer the questions with plain decoding."""
    base = (
        f"--base-model-path {pair}/target --question-file {pair}/tinybench/question.jsonl "
        "--max-new-token 12"
    )

    def answer(answer_file, *flags):
        gen_baseline_answer.main([*base.split(), "--answer-file", str(answer_file), *flags])

    return answer


@pytest.fixture(scope="session")
def paper_pair(tmp_path_factory):
    """A folder with a target, a head and, as data folder ``home``, the paper's six sets."""
    folder = tmp_path_factory.mktemp("paper-pair")
    save_pair(folder)
    for bench in grids.BENCHES:
        records = [
            {"question_id": i, "category": bench, "turns": [f"w{i} w{len(bench)}"]}
            for i in range(5)
        ]
        write_questions(folder / "home/rheosampling" / bench, records)
    return folder


@pytest.fixture
def run(paper_pair, monkeypatch, tmp_path):
    """Run an experiment on the tiny pair; returns the folder of its answers and tables."""
    models = str(paper_pair / "target"), str(paper_pair / "head")
    monkeypatch.setenv("XDG_DATA_HOME", str(paper_pair / "home"))
    monkeypatch.setitem(grids.PAIRS, "demo", grids.Pair("demo", *models, "auto", "fp32"))

    def run(name, more="", results=tmp_path / "results"):
        flags = f"--pair demo --limit 3 --max-new-token 6 --results {results}"
        experiment.main(f"{name} {flags} {more}".split())
        return results / name / "demo/cap6"

    return run
