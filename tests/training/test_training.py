"""Training runs: what they write, how they resume, and what they refuse."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from support.tiny import tiny_tokenizer

from eagle.model.draft.checkpoint import load_draft
from eagle.model.ea_model import EaModel
from eagle.traineagle3 import generate, train
from eagle.traineagle3.corpus import read_corpus
from eagle.traineagle3.heldout import HeldOut
from eagle.traineagle3.new_head import new_config, new_head
from eagle.traineagle3.run_folder import RunFolder
from eagle.traineagle3.schedule import Batches, learning_rate

SIZES = "--total-token 12 --depth 3 --top-k 4"
TREE = {"total_token": 12, "depth": 3, "tree_top_k": 4}
SHORT = "--epochs 0.2"  # a single step


@pytest.fixture
def with_plots():
    """Let runs write their plots, which take most of the time of a tiny run."""


@pytest.fixture(autouse=True)
def small_runs(monkeypatch, request):
    """Make runs of one process possible, one after the other, with few conversations and no plots.

    accelerate keeps one state per process; one prompt in 50 would be none of so few.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(train, "HELD_OUT_ONE_IN", 10)
    if "with_plots" not in request.fixturenames:
        monkeypatch.setattr(RunFolder, "plot", lambda self: None)


def training(work, output, more=""):
    """Train on the corpus in ``work``; ``more`` overrides options."""
    train.main(
        f"--base-model-path {work}/target --data {work}/corpus.jsonl --output {output} "
        "--draft-vocab-size 28 --batch-tokens 512 --steps 3 --lr 5e-3 --precision no "
        f"--measure-every 1000 --log-every 10 --held-out 8 {SIZES} {more}".split()
    )


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["head"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# What a run learns and writes


@pytest.mark.full
def test_a_head_overfits_a_small_corpus_and_its_tau_rises(work, tmp_path, with_plots):
    training(work, tmp_path / "run", "--epochs 60")
    records = metrics(tmp_path / "run")
    learning, measured = [r for r in records if "loss" in r], [r for r in records if "tau" in r]
    assert learning[-1]["agreement"][0] > 0.5 > learning[0]["agreement"][0]
    assert learning[-1]["loss"][2] < learning[0]["loss"][2]
    assert [r["step"] for r in measured] == [0, learning[-1]["step"]]
    assert (tmp_path / "run/curve.png").stat().st_size > 10_000
    # The result is a head in the official layout. On texts that it knows it accepts far more.
    head = str(tmp_path / "run/head")
    model = EaModel.from_pretrained(str(work / "target"), head, total_token=12, depth=3, top_k=4)
    assert model.draft.d2t.numel() == 28
    target, corpus = model.target, read_corpus([work / "corpus.jsonl"], 32)
    known = HeldOut(target, corpus[:10], 4, 99, TREE)
    untrained, _ = new_head(target, new_config(target, 28), model.draft.target_ids(), 0)
    before, after = (known.tau(known.sums(head)) for head in (untrained, model.draft))
    assert all(after[method] > before[method] + 0.4 for method in ("topk", "rheo")), (before, after)


def test_a_saved_head_is_in_the_layout_that_eagle_reads(work, tmp_path):
    """Keys, shapes and dtypes; with the embedding, which EAGLE does not find in every target."""
    training(work, tmp_path / "run", f"{SHORT} --with-embedding")
    state = load_file(tmp_path / "run/head/model.safetensors")
    config = json.loads((tmp_path / "run/head/config.json").read_text())
    assert config["hidden_size"] % config["num_attention_heads"] == 0
    assert config["target_hidden_size"] == 32
    d2t, t2d = state["d2t"], state["t2d"]
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool and t2d.sum() == 28
    assert all(t.dtype == torch.float16 for name, t in state.items() if name not in ("d2t", "t2d"))
    layer = [f"self_attn.{name}_proj" for name in "qkvo"]
    layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    names = {f"midlayer.{name}.weight" for name in layer} | {"d2t", "t2d"}
    names |= {f"{name}.weight" for name in ("fc", "norm", "lm_head", "embed_tokens")}
    assert set(state) == names
    assert state["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert state["fc.weight"].shape == (32, 96)
    model = EaModel.from_pretrained(str(work / "target"), str(tmp_path / "run/head"))
    stored, embedding = model.draft.embed_tokens.weight, model.target.embedding.weight
    assert torch.allclose(stored, embedding, atol=1e-3)


def test_an_equal_vocabulary_needs_no_mapping(work, tmp_path):
    training(work, tmp_path / "run", f"{SHORT} --draft-vocab-size 32")
    head = load_draft(str(tmp_path / "run/head"), 32, 32, 8)
    assert not head.reduced and "d2t" not in weights(tmp_path / "run")


@pytest.mark.full
def test_training_in_half_precision_keeps_float32_weights(work, tmp_path):
    training(work, tmp_path / "run", "--epochs 20 --precision bf16 --dtype bf16 --log-every 5")
    losses = [r["loss"][0] for r in metrics(tmp_path / "run") if "loss" in r]
    assert losses[-1] < 0.8 * losses[0]
    assert weights(tmp_path / "run")["fc.weight"].dtype == torch.float32


@pytest.mark.full
def test_several_processes_train_one_head(work, tmp_path):
    """Two processes see twice the conversations a step, and the head they write is whole."""
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m eagle.traineagle3.train "
        f"--base-model-path {work}/target --data {work}/corpus.jsonl --output {tmp_path}/run "
        "--draft-vocab-size 28 --batch-tokens 256 --steps 2 --epochs 4 --lr 5e-3 --precision no "
        f"--held-out 2 --log-every 4 {SIZES}"
    )

    def run():
        done = subprocess.run(
            [sys.executable, *command.split()],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "on 2 x cpu" in run()
    assert load_draft(str(tmp_path / "run/head"), 32, 32, 8).d2t.numel() == 28
    losses = [r["loss"][0] for r in metrics(tmp_path / "run") if "loss" in r]
    assert len(losses) > 2 and losses[-1] < losses[0]
    assert "resuming from step" in run()


# Where a run starts


@pytest.mark.parametrize("kept", [False, True], ids=["features computed", "features kept"])
def test_a_resumed_run_ends_with_the_same_weights(work, tmp_path, monkeypatch, kept):
    def short_training(name):
        features = f"--features {tmp_path}/features-{name}" if kept else ""
        training(work, tmp_path / name, f"--epochs 2 --save-every 3 --log-every 2 {features}")

    def interrupted(self):
        if self.step == 7:
            raise KeyboardInterrupt
        return train_step(self)

    short_training("whole")
    train_step = train.Run.train_step
    monkeypatch.setattr(train.Run, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        short_training("part")
    monkeypatch.setattr(train.Run, "train_step", train_step)
    short_training("part")
    whole, part = weights(tmp_path / "whole"), weights(tmp_path / "part")
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    of_whole, of_part = (
        [(r["step"], "tau" in r) for r in metrics(tmp_path / name)] for name in ("whole", "part")
    )
    assert of_part == of_whole == sorted(set(of_part)) and of_part[-1][0] > 7


def test_training_starts_from_a_given_head(work, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    training(work, first, "--epochs 1")
    training(work, second, f"--epochs 0.01 --lr 1e-9 --init-head {first}/head")
    before, after = weights(first), weights(second)
    for name, weight in before.items():
        assert torch.allclose(weight.half().float(), after[name].float(), atol=1e-6), name


def test_another_seed_gives_other_weights(work, tmp_path):
    for seed in (0, 1):
        training(work, tmp_path / str(seed), f"{SHORT} --seed {seed}")
    first, second = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(first["fc.weight"], second["fc.weight"])


# What a run refuses


def test_a_folder_of_other_settings_is_refused_naming_them(work, tmp_path):
    training(work, tmp_path / "run", SHORT)
    with pytest.raises(SystemExit, match="lr 0.005 then, 0.1 now"):
        training(work, tmp_path / "run", f"{SHORT} --lr 0.1")


def test_a_setting_outside_its_range_is_refused(work, tmp_path):
    with pytest.raises(SystemExit, match="warmup is 1.5"):
        training(work, tmp_path / "run", "--warmup 1.5")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--draft-vocab-size 99", "draft_vocab_size is 99"),
        ("--data nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_a_refused_run_does_not_block_its_folder(work, tmp_path, wrong, message):
    with pytest.raises(SystemExit, match=message):
        training(work, tmp_path / "run", wrong)
    training(work, tmp_path / "run", SHORT)


def test_changed_data_are_refused(work, tmp_path):
    data = tmp_path / "corpus.jsonl"
    lines = (work / "corpus.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:60]))
    training(work, tmp_path / "run", f"{SHORT} --data {data}")
    before = weights(tmp_path / "run")
    training(work, tmp_path / "run", f"{SHORT} --data {data}")  # a finished run stays as it is
    after = weights(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)
    data.write_text("".join(lines))
    with pytest.raises(SystemExit, match="the data files have changed since"):
        training(work, tmp_path / "run", f"{SHORT} --data {data}")


def test_a_checkpoint_with_other_parameters_is_refused(work, tmp_path):
    training(work, tmp_path / "run", SHORT)
    path = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["optimizer"]["param_groups"][0]["params"].append(99)
    torch.save(state, path)
    with pytest.raises(SystemExit, match="does not fit this version; choose another --output"):
        training(work, tmp_path / "run", SHORT)


def test_kept_features_of_another_target_are_refused(work, tmp_path):
    features = f"--features {tmp_path}/features"
    training(work, tmp_path / "run", f"{SHORT} {features}")
    other = EaModel.from_pretrained(str(work / "target"), pack_weights=False)
    other.base_model.model.layers[-1].mlp.up_proj.weight.data += 0.01
    other.base_model.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match="keeps the features of other texts or of another target"):
        base = f"--base-model-path {tmp_path}/other"
        training(work, tmp_path / "other-run", f"{SHORT} {features} {base}")


def test_kept_features_of_other_texts_are_refused(work, tmp_path):
    features = f"--features {tmp_path}/features"
    training(work, tmp_path / "run", f"{SHORT} {features}")
    with pytest.raises(SystemExit, match="keeps the features of other texts"):
        training(work, tmp_path / "other", f"{SHORT} {features} --max-length 20")


def test_a_corpus_that_cannot_be_written_or_resumed_is_refused(work, tmp_path):
    def generating(output, more):
        options = f"--base-model-path {work}/target --output {output} --conversations 9 {more}"
        generate.main(options.split())

    with pytest.raises(SystemExit, match="batches in a row gave no conversation"):
        generating(tmp_path / "short.jsonl", "--max-question 1 --batch-size 2")
    lost, whole = tmp_path / "lost.jsonl", "--batch-size 9 --question-temperature 3"
    generating(lost, whole)
    lost.unlink()
    with pytest.raises(SystemExit, match="has 0 bytes and should have"):
        generating(lost, whole)


# Batches and learning rate


def test_every_epoch_takes_each_conversation_once_and_steps_end_with_the_batches():
    lengths = torch.randint(5, 90, (211,), generator=torch.Generator().manual_seed(1)).tolist()
    for epochs, processes in ((1, 1), (3, 1), (2.5, 2), (3, 3), (0.01, 2)):
        batches = Batches(lengths, 256, epochs, 0, processes)
        steps = range(batches.steps)
        taken = [batches.at(step, process) for step in steps for process in range(processes)]
        counts = torch.bincount(torch.tensor(sum(taken, [])), minlength=211)
        assert counts.max() <= math.ceil(epochs) and counts.sum() <= epochs * 211 + 40 * processes
        if epochs == 3 and processes == 1:
            assert counts.tolist() == [3] * 211
        for batch in taken:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 256


def test_the_seed_decides_the_order_of_the_batches():
    first, second = (Batches([5, 9, 7, 8], 10, 1, seed, 1).order for seed in (0, 1))
    assert first != second


def test_fewer_batches_than_devices_are_refused():
    with pytest.raises(ValueError, match="fewer than the 99 devices"):
        Batches([5, 9, 7, 8], 10_000, 1, 0, 99)


def test_the_learning_rate_rises_then_falls_to_nothing():
    rates = [learning_rate(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.001
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))
