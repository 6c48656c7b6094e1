"""The greedy check on a tiny pair."""

import pytest

from eagle.model.ea_model import EaModel
from evaluation.checks import greedy


def test_greedy_check_tells_a_tie_from_a_fault(pair, capsys, monkeypatch):
    arguments = (
        f"--base-model-path {pair}/target --ea-model-path {pair}/head "
        f"--question-file {pair}/tinybench/question.jsonl --max-new-token 32"
    ).split()
    with pytest.raises(SystemExit, match="0"):
        greedy.main(arguments)
    assert capsys.readouterr().out.count("identical") == 8
    naive = EaModel.naivegenerate

    def other_last_token(self, prompt, **kwargs):
        ids = naive(self, prompt, **kwargs)
        ids[0, -1] = (ids[0, -1] + 1) % 32
        return ids

    monkeypatch.setattr(EaModel, "naivegenerate", other_last_token)
    arguments += ["--question-end", "1", "--max-new-token", "12"]
    with pytest.raises(SystemExit, match="1"):
        greedy.main(arguments)
    assert "FAULT: first difference at new token" in capsys.readouterr().out
    monkeypatch.setattr(greedy, "top2_gap", lambda model, ids: 1e-7)
    with pytest.raises(SystemExit, match="0"):
        greedy.main(arguments)
    assert "tie: first difference" in capsys.readouterr().out
