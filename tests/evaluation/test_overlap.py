"""The overlap check finds a question in a corpus, long or short."""

import json

import pytest
from support.tiny import tiny_target, tiny_tokenizer

from evaluation.checks import overlap


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def check(target, folder, question, text):
    """Exit status of the check of one question against a corpus of one text."""
    (folder / "question.jsonl").write_text(json.dumps({"question_id": 1, "turns": [question]}))
    ids = tiny_tokenizer()(text).input_ids
    (folder / "corpus.jsonl").write_text(json.dumps({"p": ids[:1], "r": ids[1:], "T": 1.0}) + "\n")
    files = f"--data {folder}/corpus.jsonl --against {folder}/question.jsonl"
    with pytest.raises(SystemExit) as end:
        overlap.main(f"--base-model-path {target} {files} --n 4 6".split())
    return end.value.code


def table_row(n, capsys):
    """The last cells of the printed row for n."""
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return next(row[2:] for row in rows if row[1] == str(n))


def test_a_question_in_the_corpus_is_found_and_another_is_not(target, tmp_path, capsys):
    question = "w1 w2 w3 w4 w5 w6 w7 w8"
    assert check(target, tmp_path, question, f"w20 {question} w21") == 1
    assert table_row(6, capsys) == ["3", "3", "1 of 1"]
    # Four words in a row are shared, six are not.
    assert check(target, tmp_path, question, "w1 w2 w3 w4 w5 w20 w6 w7 w8") == 0
    assert table_row(4, capsys) == ["5", "2", "1 of 1"]


def test_a_question_shorter_than_n_is_looked_for_as_a_whole(target, tmp_path):
    assert check(target, tmp_path, "w1 w2 w3", "w9 w1 w2 w3 w9") == 1
    assert check(target, tmp_path, "w1 w2 w3", "w9 w1 w2 w9 w3") == 0


def test_bad_input_ends_with_one_line(target, capsys):
    with pytest.raises(SystemExit) as end:
        files = "--data nowhere.jsonl --against nowhere.jsonl"
        overlap.main(f"--base-model-path {target} {files}".split())
    assert end.value.code == 2 and "nowhere.jsonl" in capsys.readouterr().err
