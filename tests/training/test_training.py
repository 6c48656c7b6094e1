"""Training of heads: what is learnt from, what is learnt, and that a run can be taken up again."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from support.tiny import draft_ids, tiny_head, tiny_target, tiny_tokenizer
from torch.nn.functional import linear

from eagle.model.draft.checkpoint import load_draft
from eagle.model.draft.state import DraftState
from eagle.model.ea_model import EaModel
from eagle.model.target import TargetModel
from eagle.traineagle3 import generate, train
from eagle.traineagle3.corpus import Conversation, read_corpus
from eagle.traineagle3.heldout import HeldOut
from eagle.traineagle3.new_head import new_config, new_head
from eagle.traineagle3.objective import Batch, TrainingTimeTest, supervised
from eagle.traineagle3.teacher import Teacher
from eagle.traineagle3.vocabulary import choose_draft_ids, coverage

SIZES = "--total-token 12 --depth 3 --top-k 4"


def batch_of(target, texts, firsts, aux_layers=(0, 1, 2)):
    teacher = Teacher(
        TargetModel(target),
        [Conversation(t[:f], t[f:], 1.0) for t, f in zip(texts, firsts)],
        list(aux_layers),
        99,
    )
    return teacher.batch(list(range(len(texts))))


def random_texts(*lengths):
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(32, (n,), generator=chance).tolist() for n in lengths]


@pytest.fixture(autouse=True)
def fresh_program(monkeypatch):
    """Each run of a test is a program of its own (accelerate keeps one state a process), and holds some of the few conversations out."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(train, "HELD_OUT_ONE_IN", 10)


# What is learnt


def test_training_sees_what_drafting_sees():
    """At every row and step the trained logits are those that decoding computes after the same committed and drafted tokens."""
    target, steps = tiny_target(), 4
    head = tiny_head(target, 24)
    texts = random_texts(14, 9)
    batch, objective = (
        batch_of(target, texts, [3, 2]),
        TrainingTimeTest(head, target.get_input_embeddings(), target.lm_head, steps, 1.0),
    )
    logits = []
    original = head.logits
    head.logits = lambda hidden: logits.append(original(hidden)) or logits[-1]
    with torch.no_grad():
        objective(batch)
    head.logits = original
    compared = 0
    for step in range(steps):
        rows = supervised(batch, step).nonzero().tolist()
        assert len(rows) == len(logits[step])
        for (text, row), trained in zip(rows, logits[step]):
            with torch.inference_mode():
                state = DraftState(head, target.get_input_embeddings(), 40)
                drafted = state.commit(
                    batch.ids[text, 1 : row + 2], batch.features[text, : row + 1]
                )
                for level in range(1, step + 1):  # a chain below the root
                    drafted = state.expand(
                        batch.ids[text, row + 1 + level].reshape(1),
                        torch.zeros(1, dtype=torch.long),
                        level,
                    )[0]
            torch.testing.assert_close(trained, drafted, atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("prompt, answer", [(3, 6), (1, 5), (4, 2)])
def test_the_loss_mask_begins_where_drafting_begins(prompt, answer):
    """The first answer token is the first root, so the first token that is drafted, and learnt, is the second one."""
    length, padded = prompt + answer, prompt + answer + 3
    empty = torch.zeros(1, padded, 1)
    batch = Batch(
        torch.zeros(1, padded, dtype=torch.long),
        empty,
        empty,
        torch.tensor([prompt]),
        torch.tensor([length]),
    )
    for step in range(4):
        learnt = {
            row + 2 + step for row in supervised(batch, step)[0].nonzero()[:, 0].tolist()
        }  # index of the token predicted
        assert learnt == set(range(prompt + 1 + step, length)), step


def test_the_loss_is_the_cross_entropy_with_the_targets_law_over_the_draft_vocabulary():
    target, decay = tiny_target(), 0.5
    head = tiny_head(target, 24)
    texts, firsts = random_texts(10, 7), [4, 3]
    batch = batch_of(target, texts, firsts)
    objective = TrainingTimeTest(head, target.get_input_embeddings(), target.lm_head, 2, decay)
    seen = []
    original = head.logits
    head.logits = lambda hidden: seen.append(original(hidden)) or seen[-1]
    loss, entropies, agreement = objective(batch)
    head.logits = original
    ids, total = draft_ids(32, 24), 0
    for step in range(2):
        values, same = [], []
        for (text, row), logits in zip(supervised(batch, step).nonzero().tolist(), seen[step]):
            full = target(torch.tensor([texts[text][: row + 2 + step]])).logits[
                0, -1
            ]  # the law of the token that the row predicts
            p, log_q = full[ids].softmax(-1), logits.log_softmax(-1)
            values.append(-(p * log_q).sum())
            same.append(p.argmax() == log_q.argmax())
        assert entropies[step].item() == pytest.approx(torch.stack(values).mean().item(), abs=1e-5)
        assert agreement[step].item() == pytest.approx(torch.stack(same).float().mean().item())
        total += decay**step * torch.stack(values).mean().item()
    assert loss.item() == pytest.approx(total, abs=1e-5)


def test_only_the_head_is_trained():
    target = tiny_target()
    head = tiny_head(target, 24)
    objective = TrainingTimeTest(head, target.get_input_embeddings(), target.lm_head, 3, 0.8)
    assert {id(p) for p in objective.parameters()} == {id(p) for p in head.parameters()}
    assert set(objective.state_dict()) == {f"draft.{name}" for name in head.state_dict()}
    objective(batch_of(target, random_texts(12), [3]))[0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_padding_changes_nothing():
    target = tiny_target()
    objective = TrainingTimeTest(
        tiny_head(target, 24), target.get_input_embeddings(), target.lm_head, 3, 0.8
    )
    texts = random_texts(14, 8)
    with torch.no_grad():
        both = objective(batch_of(target, texts, [3, 3]))[1]
        one, other = (objective(batch_of(target, [t], [3]))[1] for t in texts)
    for step in range(3):
        a, b = 14 - 3 - 1 - step, 8 - 3 - 1 - step  # rows that learn
        assert both[step].item() == pytest.approx(
            (a * one[step].item() + b * other[step].item()) / (a + b), abs=1e-5
        )


# The draft vocabulary and the head to begin with


def conversations(*answers):
    return [Conversation([1, 2], list(answer), 1.0) for answer in answers]


def test_the_draft_vocabulary_is_the_most_frequent_answer_tokens():
    corpus = conversations([9, 9, 9, 4, 4, 7], [9, 4, 3])
    ids = choose_draft_ids(corpus, 3, 12)
    assert ids.tolist() == [3, 4, 9]  # 3 and 7 are seen once: the lower id
    assert coverage(corpus, ids, 12) == pytest.approx(8 / 9)


def test_a_draft_vocabulary_larger_than_what_was_seen_is_filled_up():
    ids = choose_draft_ids(conversations([9, 9, 4]), 6, 12)
    assert ids.tolist() == [0, 1, 2, 3, 4, 9]
    # Offsets that are all 0 would be refused as a mapping that was never saved.
    assert choose_draft_ids(conversations([2, 2, 0]), 4, 12).tolist() == [0, 1, 2, 4]
    assert choose_draft_ids(conversations([9]), 12, 12).tolist() == list(range(12))
    for size in (0, 13):
        with pytest.raises(ValueError, match=f"draft_vocab_size is {size}"):
            choose_draft_ids(conversations([9]), size, 12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_new_head_starts_from_the_targets_last_layer_and_output_head(family):
    target = TargetModel(tiny_target(family, layers=8))
    ids = torch.tensor([3, 5, 30])
    head, missed = new_head(target, new_config(target, 3), ids, seed=0)
    layer, state = target.layers[-1], head.state_dict()
    assert missed == [] and head.aux_layers == [2, 4, 5]
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(
            state[f"midlayer.self_attn.{name}.weight"][:, 16:],
            getattr(layer.self_attn, name).weight,
        )
    assert torch.equal(head.midlayer.self_attn.o_proj.weight, layer.self_attn.o_proj.weight)
    assert torch.equal(head.midlayer.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(head.lm_head.weight, target.output_head.weight[ids]) and torch.equal(
        head.target_ids(), ids
    )
    features = torch.randn(4, 48)
    assert torch.equal(head.fuse(features), features[:, 32:])  # the last tap as it is


def test_a_target_whose_heads_do_not_fill_its_hidden_size_gets_a_head_that_eagle_can_load():
    """Qwen3-0.6B is built so: 16 heads of 128 on a hidden size of 1024."""
    target = TargetModel(tiny_target("qwen3", layers=8, head_dim=8))
    config = new_config(target, 24)
    assert (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["hidden_size"],
    ) == (2, 2, 16)
    head, missed = new_head(target, config, torch.arange(24), seed=0)
    assert (
        missed == ["midlayer.self_attn.q_proj", "midlayer.self_attn.o_proj"]
        and head.config.head_dim == 8
    )


def test_what_cannot_start_from_the_target_is_named():
    target = TargetModel(tiny_target(layers=8))
    _, missed = new_head(
        target, new_config(target, 32, intermediate_size=20), torch.arange(32), seed=0
    )
    assert missed == ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj", "midlayer.mlp.down_proj"]


def test_a_target_that_changes_its_logits_after_the_output_head_is_refused():
    target = tiny_target()
    original = target.forward

    def capped(*args, logits_to_keep=0, **kwargs):
        output = original(*args, logits_to_keep=logits_to_keep, **kwargs)
        output.logits = 0.5 * output.logits.tanh()
        return output

    target.forward = capped
    with pytest.raises(ValueError, match="changes its logits after its output head"):
        Teacher(TargetModel(target), conversations([1, 2]), [0, 1, 2], 99)


# Whole runs


def training(work, output, more=""):
    train.main(
        f"--base-model-path {work}/target --data {work}/corpus.jsonl --output {output} --draft-vocab-size 28 --batch-tokens 512 --steps 3 "
        f"--lr 5e-3 --precision no --measure-every 1000 --log-every 10 --held-out 8 --held-out-places 4 {SIZES} {more}".split()
    )


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["head"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_head_overfits_a_small_corpus_and_its_tau_rises(work, tmp_path):
    training(work, tmp_path / "run", "--epochs 60")
    records = metrics(tmp_path / "run")
    learning, measured = [r for r in records if "loss" in r], [r for r in records if "tau" in r]
    assert learning[-1]["agreement"][0] > 0.5 > learning[0]["agreement"][0]
    assert learning[-1]["loss"][2] < learning[0]["loss"][2]
    assert [r["step"] for r in measured] == [0, learning[-1]["step"]]
    assert (tmp_path / "run/curve.svg").stat().st_size > 10_000
    # The result is a head in the official layout, and on the texts that it knows it accepts far more.
    model = EaModel.from_pretrained(
        str(work / "target"), str(tmp_path / "run/head"), total_token=12, depth=3, top_k=4
    )
    assert model.draft.d2t.numel() == 28
    known = HeldOut(
        model.target,
        read_corpus([work / "corpus.jsonl"], 32)[:10],
        4,
        99,
        {"total_token": 12, "depth": 3, "tree_top_k": 4},
    )
    beginning, _ = new_head(model.target, new_config(model.target, 28), model.draft.target_ids(), 0)
    before, after = (known.tau(known.sums(head)) for head in (beginning, model.draft))
    assert all(after[method] > before[method] + 0.4 for method in ("topk", "rheo")), (before, after)


@pytest.mark.parametrize("kept", [False, True])
def test_a_resumed_run_ends_with_the_same_weights(work, tmp_path, monkeypatch, kept):
    def features(name):
        return f"--features {tmp_path}/features-{name}" if kept else ""

    training(work, tmp_path / "whole", f"--epochs 4 --save-every 3 {features('whole')}")
    original = train.Run.train_step

    def killed(self):
        if self.step == 7:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(train.Run, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        training(work, tmp_path / "part", f"--epochs 4 --save-every 3 {features('part')}")
    monkeypatch.setattr(train.Run, "train_step", original)
    training(work, tmp_path / "part", f"--epochs 4 --save-every 3 {features('part')}")
    whole, part = weights(tmp_path / "whole"), weights(tmp_path / "part")
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    steps = [(r["step"], "tau" in r) for r in metrics(tmp_path / "part")]
    assert (
        steps
        == sorted(set(steps))
        == [(r["step"], "tau" in r) for r in metrics(tmp_path / "whole")]
    )


def test_another_seed_gives_other_weights(work, tmp_path):
    for seed in (0, 1):
        training(work, tmp_path / str(seed), f"--epochs 0.5 --seed {seed}")
    first, second = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(first["fc.weight"], second["fc.weight"])


def test_a_run_with_other_settings_is_refused_by_name(work, tmp_path):
    training(work, tmp_path / "run", "--epochs 0.2")
    with pytest.raises(SystemExit, match="lr 0.005 then, 0.1 now"):
        training(work, tmp_path / "run", "--epochs 0.2 --lr 0.1")
    with pytest.raises(SystemExit, match="warmup is 1.5"):
        training(work, tmp_path / "other", "--warmup 1.5")


def test_a_run_whose_data_changed_is_refused(work, tmp_path):
    data = tmp_path / "corpus.jsonl"
    lines = (work / "corpus.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:60]))
    command = f"--base-model-path {work}/target --data {data} --output {tmp_path}/run --draft-vocab-size 28 --epochs 0.2 --precision no"
    train.main(command.split())
    train.main(command.split())  # a finished run stays as it is
    data.write_text("".join(lines))
    with pytest.raises(SystemExit, match="the data files have changed since"):
        train.main(command.split())


def test_a_checkpoint_of_another_layout_is_refused(work, tmp_path):
    training(work, tmp_path / "run", "--epochs 0.2")
    path = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["optimizer"]["param_groups"][0]["params"].append(99)  # gate and up apart, say
    torch.save(state, path)
    with pytest.raises(SystemExit, match="does not fit this version; choose another --output"):
        training(work, tmp_path / "run", "--epochs 0.2")


def test_settings_that_came_to_nothing_do_not_block_the_folder(work, tmp_path):
    for wrong in ("--draft-vocab-size 99", "--data nowhere.jsonl"):
        with pytest.raises(SystemExit, match="draft_vocab_size is 99|nowhere.jsonl"):
            training(work, tmp_path / "run", wrong)
    training(work, tmp_path / "run", "--epochs 0.2")
    (tmp_path / "corpus.jsonl").parent.mkdir(exist_ok=True)
    with pytest.raises(SystemExit, match="batches in a row gave no conversation"):
        generate.main(
            f"--base-model-path {work}/target --output {tmp_path}/c.jsonl --conversations 9 --max-question 1 --batch-size 2".split()
        )
    generate.main(
        f"--base-model-path {work}/target --output {tmp_path}/d.jsonl --conversations 9 --batch-size 9 --question-temperature 3".split()
    )
    (tmp_path / "d.jsonl").unlink()
    with pytest.raises(SystemExit, match="has 0 bytes and should have"):
        generate.main(
            f"--base-model-path {work}/target --output {tmp_path}/d.jsonl --conversations 9 --batch-size 9 --question-temperature 3".split()
        )


def test_a_saved_head_is_what_eagle_reads(work, tmp_path):
    """Keys, shapes and dtypes of the official layout; with the embedding, for targets whose files EAGLE does not find it in."""
    training(work, tmp_path / "run", "--epochs 0.2 --with-embedding")
    state = load_file(tmp_path / "run/head/model.safetensors")
    config = json.loads((tmp_path / "run/head/config.json").read_text())
    assert (
        config["hidden_size"] % config["num_attention_heads"] == 0
        and config["target_hidden_size"] == 32
    )
    assert (
        state["d2t"].dtype == torch.int64
        and state["t2d"].dtype == torch.bool
        and state["t2d"].sum() == 28
    )
    assert all(t.dtype == torch.float16 for name, t in state.items() if name not in ("d2t", "t2d"))
    projections = [f"self_attn.{n}_proj" for n in "qkvo"] + [
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    ]
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    assert set(state) == {f"midlayer.{n}.weight" for n in projections + norms} | {
        "fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
    }  # fmt: skip
    assert state["midlayer.self_attn.q_proj.weight"].shape == (32, 64) and state[
        "fc.weight"
    ].shape == (32, 96)
    target = EaModel.from_pretrained(str(work / "target"), str(tmp_path / "run/head"))
    assert torch.allclose(
        target.draft.embed_tokens.weight, target.target.embedding.weight, atol=1e-3
    )


def test_training_runs_in_half_precision_where_it_is_asked_for(work, tmp_path):
    training(work, tmp_path / "run", "--epochs 20 --precision bf16 --dtype bf16 --log-every 5")
    losses = [r["loss"][0] for r in metrics(tmp_path / "run") if "loss" in r]
    assert losses[-1] < 0.8 * losses[0]
    assert (
        weights(tmp_path / "run")["fc.weight"].dtype == torch.float32
    )  # only products are in half precision


def test_features_of_another_target_are_not_mistaken_for_these(work, tmp_path):
    training(work, tmp_path / "run", f"--epochs 0.2 --features {tmp_path}/features")
    sister = EaModel.from_pretrained(str(work / "target"), pack_weights=False)
    sister.base_model.model.layers[-1].mlp.up_proj.weight.data += 0.01
    sister.base_model.save_pretrained(tmp_path / "sister")
    tiny_tokenizer().save_pretrained(tmp_path / "sister")
    with pytest.raises(SystemExit, match="keeps the features of other texts or of another target"):
        training(
            work,
            tmp_path / "other",
            f"--epochs 0.2 --features {tmp_path}/features --base-model-path {tmp_path}/sister",
        )


def test_features_of_other_texts_are_not_mistaken_for_these(work, tmp_path):
    training(work, tmp_path / "run", f"--epochs 0.2 --features {tmp_path}/features")
    with pytest.raises(SystemExit, match="keeps the features of other texts"):
        training(
            work, tmp_path / "other", f"--epochs 0.2 --features {tmp_path}/features --max-length 20"
        )


def test_training_goes_on_from_a_given_head(work, tmp_path):
    training(work, tmp_path / "first", "--epochs 1")
    training(
        work, tmp_path / "second", f"--epochs 0.01 --lr 1e-9 --init-head {tmp_path}/first/head"
    )
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(
        torch.allclose(before[name].half().float(), after[name].float(), atol=1e-6)
        for name in before
    )


def test_an_equal_vocabulary_needs_no_mapping(work, tmp_path):
    training(work, tmp_path / "run", "--epochs 0.2 --draft-vocab-size 32")
    head = load_draft(str(tmp_path / "run/head"), 32, 32, 8)
    assert not head.reduced and "d2t" not in weights(tmp_path / "run")


def test_every_epoch_takes_each_conversation_once_and_steps_end_with_the_batches():
    lengths = torch.randint(5, 90, (211,), generator=torch.Generator().manual_seed(1)).tolist()
    for epochs, processes in ((1, 1), (3, 1), (2.5, 2), (3, 3), (0.01, 2)):
        batches = train.Batches(lengths, 256, epochs, 0, processes)
        taken = [
            batches.at(step, process)
            for step in range(batches.steps)
            for process in range(processes)
        ]
        counts = torch.bincount(torch.tensor(sum(taken, [])), minlength=211)
        assert counts.max() <= math.ceil(epochs) and counts.sum() <= epochs * 211 + 40 * processes
        if epochs == 3 and processes == 1:
            assert counts.tolist() == [3] * 211
        for batch in taken:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 256
    assert train.Batches(lengths, 256, 1, 0, 1).order != train.Batches(lengths, 256, 1, 1, 1).order
    with pytest.raises(ValueError, match="fewer than the 99 devices"):
        train.Batches(lengths, 10_000, 1, 0, 99)


def test_the_learning_rate_rises_then_falls_to_nothing():
    rates = [train.learning_rate(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.001
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))


def test_several_processes_train_one_head(work, tmp_path):
    """Two processes see twice the conversations a step, and the head they write is whole."""
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m eagle.traineagle3.train "
        f"--base-model-path {work}/target --data {work}/corpus.jsonl --output {tmp_path}/run "
        f"--draft-vocab-size 28 --batch-tokens 256 --steps 2 --epochs 4 --lr 5e-3 --precision no --held-out 2 --log-every 4 {SIZES}"
    )
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command.split()],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 x cpu" in done.stdout
    assert load_draft(str(tmp_path / "run/head"), 32, 32, 8).d2t.numel() == 28
    losses = [r["loss"][0] for r in metrics(tmp_path / "run") if "loss" in r]
    assert len(losses) > 2 and losses[-1] < losses[0]
    again = subprocess.run(
        [sys.executable, *command.split()],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert again.returncode == 0 and "going on from step" in again.stdout


def test_linear_bias_of_the_output_head_is_part_of_the_targets_law():
    target = tiny_target()
    target.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, 32))
    objective = TrainingTimeTest(
        tiny_head(target, 24), target.get_input_embeddings(), target.lm_head, 1, 1.0
    )
    _, weight, bias = objective.frozen
    hidden = torch.randn(3, 16)
    expected = target.lm_head(hidden)[:, draft_ids(32, 24)]
    torch.testing.assert_close(linear(hidden, weight, bias), expected)
