"""Conversations that a target makes for training: distribution, files, and the held-out part."""

import gzip

import pytest
import torch
from scipy.stats import chisquare
from support.tiny import tiny_tokenizer

from eagle.model.cycle import NonFiniteLogits
from eagle.model.ea_model import EaModel
from eagle.traineagle3 import batch_sampling, generate
from eagle.traineagle3.batch_sampling import BatchSampler, TokenSampler, cut
from eagle.traineagle3.corpus import Conversation, read_corpus
from eagle.traineagle3.heldout import split


def test_conversations_follow_the_chat_template_and_end_at_the_first_stop_token(work):
    tokenizer, target = tiny_tokenizer(), EaModel.from_pretrained(str(work / "target"))
    corpus = read_corpus([work / "corpus.jsonl"], 32)
    assert len(corpus) >= 80
    for conversation in corpus:
        text = tokenizer.decode(conversation.prompt)
        assert text.count("<|user|>") == 1, text
        assert text.split()[-2:] == ["<|end|>", "<|assistant|>"], text
        stops = [token in target.stop_ids for token in conversation.answer]
        assert 1 <= len(stops) <= 24 and not any(stops[:-1])
        assert stops[-1] or len(stops) == 24
    assert {c.temperature for c in corpus} == {1.0, 0.7, 0.3}


def test_the_texts_of_a_batch_are_those_of_plain_decoding(work, monkeypatch):
    """At a temperature near 0 each text is the greedy one.

    So left padding, masks, positions and the shrinking cache are right, and the model's own
    generation config is not applied.
    """
    monkeypatch.setattr(batch_sampling, "STRETCH", 3)
    model = EaModel.from_pretrained(str(work / "target"))
    model.base_model.generation_config.update(
        repetition_penalty=9.0, min_length=12, suppress_tokens=[14, 21]
    )
    words = torch.Generator().manual_seed(0)
    prompts = [
        [3, *torch.randint(7, 32, (n,), generator=words).tolist(), 4, 5]
        for n in (2, 1, 5, 3, 4, 2, 6, 1, 3)
    ]
    stop_ids = model.stop_ids | {9, 17, 25}
    texts = BatchSampler(model).sample(prompts, 1e-4, 12, stop_ids)
    for prompt, text in zip(prompts, texts):
        ids = torch.tensor([prompt])
        greedy = model.naivegenerate(ids, temperature=0.0, max_new_tokens=12)[0, len(prompt) :]
        assert text == cut(greedy.tolist(), stop_ids)
    stretches = {-(-len(ids) // 3) for ids, _ in texts}
    assert len(stretches) > 2  # the texts end in different stretches


def test_a_token_sampled_by_blocks_has_the_distribution_of_its_row():
    logits = 2 * torch.randn(2, 600, generator=torch.Generator().manual_seed(0))
    logits[:, 100:500] = -torch.inf
    torch.manual_seed(0)
    rows, temperature = 20_000, 0.7
    scores = TokenSampler(temperature)(None, logits.repeat_interleave(rows, 0))
    assert (scores > -torch.inf).sum(-1).eq(1).all()
    sampled = scores.argmax(-1).view(2, rows)
    for tokens, probs in zip(sampled, (logits.double() / temperature).softmax(-1)):
        counts = tokens.bincount(minlength=600).double()
        assert counts[probs == 0].sum() == 0
        often = probs * rows >= 10
        found, expected = ([*w[often], w[~often].sum()] for w in (counts, probs * rows))
        assert chisquare(found, expected).pvalue > 1e-4


@pytest.mark.parametrize("vocab", [512, 600])
def test_broken_logits_raise_and_give_no_token(vocab):
    logits = torch.zeros(2, vocab).index_fill(1, torch.tensor([3]), torch.inf)
    with pytest.raises(NonFiniteLogits):
        TokenSampler(1.0)(None, logits)


def test_an_interrupted_corpus_continues_to_the_same_file(work, tmp_path):
    command = (
        f"--base-model-path {work}/target --batch-size 5 --max-answer 6 --max-question 6 "
        "--question-temperature 3 --seed 3"
    )
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    generate.main(f"{command} --output {whole} --conversations 14".split())
    generate.main(f"{command} --output {part} --conversations 6".split())
    with part.open("a") as file:
        file.write('{"p": [1, 2], "r"')  # killed in the middle of a batch
    generate.main(f"{command} --output {part} --conversations 14".split())
    assert part.read_bytes() == whole.read_bytes()
    with pytest.raises(SystemExit, match="seed 3 then, 4 now"):
        generate.main(f"{command} --output {part} --conversations 20 --seed 4".split())


def test_each_user_turn_of_a_file_is_answered_once(work, tmp_path):
    (tmp_path / "users.jsonl").write_text('{"turns": ["w1 w2", "w9"]}\n{"prompt": "w3"}\n')
    (tmp_path / "users.txt").write_text("w1 w2\n\nw3\n")
    for suffix in ("jsonl", "txt"):
        users, output = tmp_path / f"users.{suffix}", tmp_path / f"{suffix}.jsonl.gz"
        command = f"--base-model-path {work}/target --prompts {users} --output {output}"
        generate.main(f"{command} --batch-size 1".split())
        texts = [tiny_tokenizer().decode(c.prompt) for c in read_corpus([output], 32)]
        assert len(texts) == 2 and "w1 w2" in texts[0] and "w3" in texts[1]


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{}\n", "line 1: not a conversation"),
        ('{"p": [1], "r": [99], "T": 1}\n', "line 1: ids 1..99 outside"),
        ("", "no conversations in"),
    ],
)
def test_a_bad_corpus_is_refused_by_file_and_line(tmp_path, line, problem):
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ValueError, match=problem):
        read_corpus([tmp_path / "bad.jsonl"], 32)


def test_a_damaged_or_cut_gzip_file_is_refused_by_name(tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    whole = gzip.compress(b'{"p": [1], "r": [2], "T": 1}\n' * 400)
    damaged = whole[:30] + bytes([whole[30] ^ 255]) + whole[31:]
    for content, problem in (
        (whole[:-9], "cut off"),
        (damaged, "damaged"),
        (b"x", "damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"corpus.jsonl.gz is {problem}"):
            read_corpus([file], 32)


def test_a_prompt_stays_on_its_side_when_the_corpus_grows():
    corpus = [Conversation([i, i + 1], [i + 2, i % 7], 1.0) for i in range(400)]
    answered_again = [Conversation(c.prompt, [1, 2, 3], 0.7) for c in corpus[:300]]
    small, large = split(corpus[:200], 10), split(corpus + answered_again, 10)
    assert len(large[1]) > 20
    prompts = [{tuple(c.prompt) for c in side} for side in large]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 400
    for side in (0, 1):
        assert {tuple(c.prompt) for c in small[side]} <= prompts[side]
