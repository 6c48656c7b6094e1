"""Question sets and chat templates."""

import hashlib

import pytest
from support.tiny import tiny_tokenizer

from evaluation.common import questions
from evaluation.common.prompts import build_prompt, check_template
from evaluation.common.questions import load_questions, question_file


def test_questions_are_checked(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a question"):
        load_questions(path)
    path.write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["b"]}')
    with pytest.raises(ValueError, match="line 2.*seen before"):
        load_questions(path)
    path.write_text('{"question_id": 1, "turns": []}')
    with pytest.raises(ValueError, match="line 1.*no turns"):
        load_questions(path)
    with pytest.raises(FileNotFoundError, match="no question set 'nothing'"):
        question_file("nothing")


def test_the_papers_sets_are_fetched_checked_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    how = "python -m evaluation.questions fetch gets it"
    with pytest.raises(FileNotFoundError, match=f"no question set 'qa': {how}"):
        question_file("qa")
    source = tmp_path / "eagle/data"
    (source / "qa").mkdir(parents=True)
    # No line end after the last record, as in two of the six sets.
    text = '{"question_id": 1, "category": "qa", "turns": ["Why?"]}'
    (source / "qa/question.jsonl").write_text(text)
    fetch = ["fetch", "qa", "--from", str(source)]
    with pytest.raises(SystemExit, match="is not the published question set: its SHA-256 is"):
        questions.main(fetch)
    assert not (tmp_path / "home").exists()  # nothing is left behind
    monkeypatch.setitem(questions.SHA256, "qa", hashlib.sha256(text.encode()).hexdigest())
    questions.main(fetch)
    assert "qa: 1 questions" in capsys.readouterr().out
    assert load_questions(question_file("qa"))[0].turns == ("Why?",)
    (source / "qa/question.jsonl").unlink()
    questions.main(fetch)  # a set that is there is not fetched again
    (tmp_path / "home/rheosampling/qa/question.jsonl").write_text("damaged")
    with pytest.raises(SystemExit, match="question.jsonl"):
        questions.main(fetch)


def test_without_a_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(questions, "SOURCE", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match="cannot be reached .*give it with --from"):
        questions.main(["fetch", "sum"])
    with pytest.raises(SystemExit, match="unknown question sets: math; choose among alpaca"):
        questions.main(["fetch", "math"])


def test_the_demo_set_has_24_questions_of_six_kinds():
    demo = load_questions(question_file("demo"))
    assert len(demo) == 24 and len({q.category for q in demo}) == 6


def test_a_conversation_is_laid_out_by_the_tokenizers_template():
    tokenizer = tiny_tokenizer()
    ids = build_prompt("auto", tokenizer, ["w1", "w3"], ["w2"])
    expected = (
        "<|user|> w1 <|end|> <|assistant|> w2 <|end|> <|user|> w3 <|end|> <|assistant|>".split()
    )
    assert tokenizer.decode(ids[0]).split() == expected


def test_a_conversation_is_laid_out_by_the_vicuna_template():
    pytest.importorskip("fastchat")
    seen = []

    class Recorder:
        def __call__(self, text):
            seen.append(text)
            return type("Encoding", (), {"input_ids": [1]})

    build_prompt("vicuna_v1.1", Recorder(), ["Hello", "More"], ["Hi"])
    assert seen[0].endswith("USER: Hello ASSISTANT: Hi</s>USER: More ASSISTANT:")


def test_templates_that_cannot_be_used_are_refused():
    tokenizer = tiny_tokenizer()
    choices = "choose one of auto, llama-3.1, vicuna_v1.1"
    with pytest.raises(ValueError, match=f"template is 'alpaca'; {choices}"):
        check_template("alpaca", tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        check_template("auto", tokenizer)
