"""The conversations that a target makes for training: their law, their files, and who learns from them."""

import pytest
import torch
from scipy.stats import chisquare
from support.tiny import tiny_tokenizer

from eagle.model.cycle import NonFiniteLogits
from eagle.model.ea_model import EaModel
from eagle.traineagle3 import generate
from eagle.traineagle3.corpus import Conversation, read_corpus
from eagle.traineagle3.heldout import split


def test_generated_conversations_are_the_templates_and_end_at_the_first_stop_token(work):
    tokenizer, target = tiny_tokenizer(), EaModel.from_pretrained(str(work / "target"))
    corpus = read_corpus([work / "corpus.jsonl"], 32)
    assert len(corpus) >= 80
    for conversation in corpus:
        text = tokenizer.decode(conversation.prompt)
        assert text.count("<|user|>") == 1 and text.split()[-2:] == ["<|end|>", "<|assistant|>"], (
            text
        )
        stops = [token in target.stop_ids for token in conversation.answer]
        assert 1 <= len(stops) <= 24 and not any(stops[:-1])
        assert stops[-1] or len(stops) == 24
    assert {c.temperature for c in corpus} == {1.0, 0.7, 0.3}


def test_the_answers_of_a_batch_follow_the_targets_law(work, monkeypatch):
    """Left padding, masks, positions and the cache of those that go on are right, and nothing of the model's own generation config is
    applied: at a temperature near 0 each answer is the greedy one."""
    monkeypatch.setattr(generate, "STRETCH", 3)
    model = EaModel.from_pretrained(str(work / "target"))
    model.base_model.generation_config.update(
        repetition_penalty=9.0, min_length=12, suppress_tokens=[14, 21]
    )
    recipe = generate.Recipe("target", None, 4, 0, (1e-4,), 1.0, 8, 12)
    maker = generate.Conversations(model, recipe, None)
    words = torch.Generator().manual_seed(0)
    prompts = [
        [3, *torch.randint(7, 32, (n,), generator=words).tolist(), 4, 5]
        for n in (2, 1, 5, 3, 4, 2, 6, 1, 3)
    ]
    ends = model.stop_ids | {9, 17, 25}
    lengths = set()
    for prompt, (answer, ended) in zip(prompts, maker.sample(prompts, 1e-4, 12, ends)):
        greedy = model.naivegenerate(torch.tensor([prompt]), temperature=0.0, max_new_tokens=12)[
            0, len(prompt) :
        ]
        assert (answer, ended) == generate.cut(greedy.tolist(), ends)
        lengths.add(len(answer))
    assert len({-(-length // 3) for length in lengths}) > 2, (
        lengths
    )  # answers end in different stretches


def test_a_token_drawn_by_blocks_has_the_law_of_its_row():
    logits = 2 * torch.randn(2, 600, generator=torch.Generator().manual_seed(0))
    logits[:, 100:500] = -torch.inf
    torch.manual_seed(0)
    rows, temperature = 20_000, 0.7
    scores = generate.Draw(temperature)(None, logits.repeat_interleave(rows, 0))
    assert (scores > -torch.inf).sum(-1).eq(1).all()
    for drawn, probs in zip(
        scores.argmax(-1).view(2, rows), (logits.double() / temperature).softmax(-1)
    ):
        counts = drawn.bincount(minlength=600).double()
        assert counts[probs == 0].sum() == 0
        often = probs * rows >= 10
        found, expected = ([*w[often], w[~often].sum()] for w in (counts, probs * rows))
        assert chisquare(found, expected).pvalue > 1e-4


def test_broken_logits_raise_and_give_no_token():
    for vocab in (512, 600):
        with pytest.raises(NonFiniteLogits):
            generate.Draw(1.0)(
                None, torch.zeros(2, vocab).index_fill(1, torch.tensor([3]), torch.inf)
            )


def test_an_interrupted_corpus_goes_on_to_the_same_file(work, tmp_path):
    command = f"--base-model-path {work}/target --batch-size 5 --max-answer 6 --max-question 6 --seed 3 --question-temperature 3"
    generate.main(f"{command} --output {tmp_path}/whole.jsonl --conversations 14".split())
    part = tmp_path / "part.jsonl"
    generate.main(f"{command} --output {part} --conversations 6".split())
    with part.open("a") as file:
        file.write('{"p": [1, 2], "r"')  # a kill in the middle of a batch
    generate.main(f"{command} --output {part} --conversations 14".split())
    assert part.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="seed 3 then, 4 now"):
        generate.main(f"{command} --output {part} --conversations 20 --seed 4".split())


def test_prompts_of_a_file_are_answered_each_once(work, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["w1 w2", "w9"]}\n{"prompt": "w3"}\n')
    (tmp_path / "prompts.txt").write_text("w1 w2\n\nw3\n")
    for suffix in ("jsonl", "txt"):
        out = tmp_path / f"out-{suffix}.jsonl.gz"
        generate.main(
            f"--base-model-path {work}/target --prompts {tmp_path}/prompts.{suffix} --output {out} --batch-size 1".split()
        )
        texts = [tiny_tokenizer().decode(c.prompt) for c in read_corpus([out], 32)]
        assert len(texts) == 2 and "w1 w2" in texts[0] and "w3" in texts[1]


def test_bad_corpora_are_named_with_their_line(tmp_path):
    for line, problem in (
        ("{}", "line 1: not a conversation"),
        ('{"p": [1], "r": [99], "T": 1}', "line 1: ids 1..99 outside"),
    ):
        (tmp_path / "bad.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match=problem):
            read_corpus([tmp_path / "bad.jsonl"], 32)
    (tmp_path / "bad.jsonl").write_text("")
    with pytest.raises(ValueError, match="no conversations in"):
        read_corpus([tmp_path / "bad.jsonl"], 32)


def test_a_conversation_stays_on_its_side_when_the_corpus_grows():
    corpus = [Conversation([i, i + 1], [i + 2, i % 7], 1.0) for i in range(400)]
    again = [
        Conversation(c.prompt, [1, 2, 3], 0.7) for c in corpus[:300]
    ]  # the same prompts, answered anew
    small, large = split(corpus[:200], 10), split(corpus + again, 10)
    assert len(large[1]) > 20
    prompts = [{tuple(c.prompt) for c in side} for side in large]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 400
    for side in (0, 1):
        assert {tuple(c.prompt) for c in small[side]} <= prompts[side]
