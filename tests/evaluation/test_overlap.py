"""The overlap check finds a question in a corpus, long or short."""

import json

import pytest
from support.tiny import tiny_target, tiny_tokenizer

from evaluation.checks import overlap


@pytest.fixture
def folder(tmp_path):
    tiny_target().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path


def check(folder, question, text):
    (folder / "question.jsonl").write_text(json.dumps({"question_id": 1, "turns": [question]}))
    ids = tiny_tokenizer()(text).input_ids
    (folder / "corpus.jsonl").write_text(json.dumps({"p": ids[:1], "r": ids[1:], "T": 1.0}) + "\n")
    command = f"--base-model-path {folder / 'target'} --data {folder / 'corpus.jsonl'} --against {folder / 'question.jsonl'} --n 4 6"
    with pytest.raises(SystemExit) as end:
        overlap.main(command.split())
    return end.value.code


def test_a_question_in_the_corpus_is_found_and_another_is_not(folder, capsys):
    long = "w1 w2 w3 w4 w5 w6 w7 w8"
    assert check(folder, long, f"w20 {long} w21") == 1
    assert "| 6 | 3 | 3 | 1 of 1 |" in capsys.readouterr().out
    assert (
        check(folder, long, "w1 w2 w3 w4 w5 w20 w6 w7 w8") == 0
    )  # four words in a row are shared, six are not
    assert "| 4 | 5 | 2 | 1 of 1 |" in capsys.readouterr().out


def test_a_question_shorter_than_n_is_looked_for_as_a_whole(folder):
    assert check(folder, "w1 w2 w3", "w9 w1 w2 w3 w9") == 1
    assert check(folder, "w1 w2 w3", "w9 w1 w2 w9 w3") == 0


def test_bad_input_ends_with_one_line(folder, capsys):
    with pytest.raises(SystemExit) as end:
        overlap.main(
            f"--base-model-path {folder / 'target'} --data nowhere.jsonl --against nowhere.jsonl".split()
        )
    assert end.value.code == 2 and "nowhere.jsonl" in capsys.readouterr().err
