"""What the draft head learns: the training positions, the loss, and the target's states."""

from contextlib import contextmanager

import pytest
import torch
from support.tiny import draft_ids, tiny_head, tiny_target
from torch.nn.functional import linear

from eagle.model.draft.state import DraftState
from eagle.model.target import TargetModel
from eagle.traineagle3.corpus import Conversation
from eagle.traineagle3.objective import Batch, TrainingTimeTest, supervised
from eagle.traineagle3.teacher import Teacher


def batch_of(target, texts, firsts):
    """One batch of texts whose answers begin at ``firsts``."""
    corpus = [Conversation(text[:first], text[first:], 1.0) for text, first in zip(texts, firsts)]
    teacher = Teacher(TargetModel(target), corpus, [0, 1, 2], 99)
    return teacher.batch(list(range(len(texts))))


def random_texts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(32, (n,), generator=generator).tolist() for n in lengths]


def objective_of(head, target, steps, decay):
    return TrainingTimeTest(head, target.get_input_embeddings(), target.lm_head, steps, decay)


@contextmanager
def recorded_logits(head):
    """The logits of every call of the draft head's output layer, in a list."""
    recorded, original = [], head.logits
    head.logits = lambda hidden: recorded.append(original(hidden)) or recorded[-1]
    yield recorded
    head.logits = original


def test_training_sees_what_drafting_sees():
    """At every row and step, training computes the logits that decoding computes there.

    Decoding has the same committed tokens and drafts the same tokens below them.
    """
    target, steps = tiny_target(), 4
    head = tiny_head(target, 24)
    embedding = target.get_input_embeddings()
    batch = batch_of(target, random_texts(14, 9), [3, 2])
    objective = objective_of(head, target, steps, 1.0)
    with torch.no_grad(), recorded_logits(head) as logits:
        objective(batch)
    compared = 0
    for step in range(steps):
        rows = supervised(batch, step).nonzero().tolist()
        assert len(rows) == len(logits[step])
        for (text, row), trained in zip(rows, logits[step]):
            ids, features = batch.ids[text], batch.features[text]
            with torch.inference_mode():
                state = DraftState(head, embedding, 40)
                drafted = state.commit(ids[1 : row + 2], features[: row + 1])
                for level in range(1, step + 1):  # a chain below the root
                    token = ids[row + 1 + level].reshape(1)
                    drafted = state.expand(token, torch.zeros(1, dtype=torch.long), level)[0]
            torch.testing.assert_close(trained, drafted, atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("prompt, answer", [(3, 6), (1, 5), (4, 2)])
def test_the_loss_mask_begins_where_drafting_begins(prompt, answer):
    """The first answer token is the first root: the second one is the first that is drafted."""
    length, padded = prompt + answer, prompt + answer + 3
    ids, empty = torch.zeros(1, padded, dtype=torch.long), torch.zeros(1, padded, 1)
    batch = Batch(ids, empty, empty, torch.tensor([prompt]), torch.tensor([length]))
    for step in range(4):
        rows = supervised(batch, step)[0].nonzero()[:, 0].tolist()
        predicted = {row + 2 + step for row in rows}
        assert predicted == set(range(prompt + 1 + step, length)), step


def test_the_loss_is_the_cross_entropy_with_the_targets_probs_over_the_draft_vocabulary():
    target, decay = tiny_target(), 0.5
    head = tiny_head(target, 24)
    texts, firsts = random_texts(10, 7), [4, 3]
    batch = batch_of(target, texts, firsts)
    objective = objective_of(head, target, 2, decay)
    with recorded_logits(head) as recorded:
        loss, entropies, agreement = objective(batch)
    ids, total = draft_ids(32, 24), 0
    for step in range(2):
        values, same = [], []
        for (text, row), logits in zip(supervised(batch, step).nonzero().tolist(), recorded[step]):
            before = torch.tensor([texts[text][: row + 2 + step]])  # the row predicts what follows
            p = target(before).logits[0, -1][ids].softmax(-1)
            log_q = logits.log_softmax(-1)
            values.append(-(p * log_q).sum())
            same.append(p.argmax() == log_q.argmax())
        mean = torch.stack(values).mean().item()
        assert entropies[step].item() == pytest.approx(mean, abs=1e-5)
        assert agreement[step].item() == pytest.approx(torch.stack(same).float().mean().item())
        total += decay**step * mean
    assert loss.item() == pytest.approx(total, abs=1e-5)


def test_the_bias_of_the_output_head_is_part_of_the_targets_probs():
    target = tiny_target()
    target.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, 32))
    _, weight, bias = objective_of(tiny_head(target, 24), target, 1, 1.0).frozen
    hidden = torch.randn(3, 16)
    expected = target.lm_head(hidden)[:, draft_ids(32, 24)]
    torch.testing.assert_close(linear(hidden, weight, bias), expected)


def test_only_the_draft_head_is_trained():
    target = tiny_target()
    head = tiny_head(target, 24)
    objective = objective_of(head, target, 3, 0.8)
    assert {id(p) for p in objective.parameters()} == {id(p) for p in head.parameters()}
    assert set(objective.state_dict()) == {f"draft.{name}" for name in head.state_dict()}
    objective(batch_of(target, random_texts(12), [3]))[0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_padding_changes_nothing():
    target = tiny_target()
    objective = objective_of(tiny_head(target, 24), target, 3, 0.8)
    long, short = random_texts(14, 8)
    with torch.no_grad():
        both, of_long, of_short = (
            objective(batch_of(target, texts, [3] * len(texts)))[1]
            for texts in ([long, short], [long], [short])
        )
    for step in range(3):
        a, b = 14 - 3 - 1 - step, 8 - 3 - 1 - step  # rows that learn
        mean = (a * of_long[step].item() + b * of_short[step].item()) / (a + b)
        assert both[step].item() == pytest.approx(mean, abs=1e-5)


def test_a_target_that_changes_its_logits_after_the_output_head_is_refused():
    target = tiny_target()
    original = target.forward

    def capped(*args, logits_to_keep=0, **kwargs):
        output = original(*args, logits_to_keep=logits_to_keep, **kwargs)
        output.logits = 0.5 * output.logits.tanh()
        return output

    target.forward = capped
    with pytest.raises(ValueError, match="changes its logits after its output head"):
        Teacher(TargetModel(target), [Conversation([1, 2], [1, 2], 1.0)], [0, 1, 2], 99)
