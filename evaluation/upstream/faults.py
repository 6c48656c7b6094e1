"""Shows faults of an EAGLE checkout by running it: started by ``evaluation.diff_upstream --faults`` with the Python of EAGLE's own environment.

Stands alone like ``worker``. Each function provokes one fault on a tiny random pair and returns what was seen, or None where
the checkout behaves as one would expect.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

PROMPT = [5, 9, 13, 7]


def load(job, head=None, **settings):
    from eagle.model.ea_model import EaModel

    sizes = {"total_token": 12, "depth": 3, "top_k": 4} | settings
    return EaModel.from_pretrained(
        base_model_path=job["base"], ea_model_path=head or job["head"], **sizes
    ).eval()


def run(model, prompt=PROMPT, **settings):
    """New token ids of one request."""
    import torch

    settings = {"temperature": 0.0, "max_new_tokens": 24, "max_length": 256} | settings
    return model.eagenerate(torch.tensor([prompt]), **settings)[0].tolist()[len(prompt) :]


def seed_does_not_repeat(job):
    """torch.manual_seed alone does not repeat a run: the coins come from Python's generator."""
    import torch

    model = load(job)
    for seed in range(20):
        texts = set()
        for _ in range(5):
            torch.manual_seed(seed)
            texts.add(tuple(run(model, temperature=1.0, max_new_tokens=60)))
        if len(texts) > 1:
            return f"{len(texts)} different texts from 5 runs with torch.manual_seed({seed})"
    return None


def cap_is_passed(job):
    """max_new_tokens is looked at after a cycle, so that a text may be longer."""
    model = load(job)
    found = {cap: len(run(model, max_new_tokens=cap)) for cap in (0, 1, 4)}
    seen = ", ".join(f"max_new_tokens={cap} gives {count}" for cap, count in found.items())
    return seen if any(count > cap for cap, count in found.items()) else None


def text_goes_on_behind_its_end(job):
    """A stop token within a cycle does not end the text there."""
    model = load(job)
    for start in range(3, 40):
        prompt = [start, start + 4, start + 8]
        model.tokenizer.eos_token = "</s>"
        text = run(model, prompt)
        for place, token in enumerate(text):
            if token in text[:place]:
                continue
            model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(token)
            cut = run(model, prompt)
            if len(cut) > place + 1 and cut[: place + 1] == text[: place + 1]:
                return f"the end token is token {place + 1} of the text, and {len(cut) - place - 1} more follow it"
    return None


def coin_of_zero_accepts_the_impossible(job):
    """A coin is compared by r <= p, and r may be exactly 0: then a token of probability 0 is accepted."""
    import torch
    from eagle.model.utils import evaluate_posterior, prepare_logits_processor

    logits = torch.full((1, 2, 4), -float("inf"))
    logits[..., 2] = 0  # the target's law is token 2 with probability 1; the candidate is token 1
    uniform, random.random = random.random, lambda: 0.0
    try:
        _, accepted, _ = evaluate_posterior(
            logits, torch.tensor([[0, 1]]), prepare_logits_processor(temperature=1.0)
        )
    finally:
        random.random = uniform
    return (
        "a drafted token of probability 0 was accepted at a coin of 0.0"
        if int(accepted) == 1
        else None
    )


def cache_keeps_the_first_length(job):
    """The cache is made by the first request, with its max_length: a longer one later does not fit."""
    model = load(job)
    run(model, max_length=64, max_new_tokens=4)
    try:
        run(model, prompt=PROMPT * 25, max_length=256, max_new_tokens=4)
    except RuntimeError as error:
        return f"a prompt of 100 tokens after a request with max_length=64: {str(error).splitlines()[0]}"
    return None


def wrong_head_loads(job):
    """Weights are loaded with strict=False and the result is not looked at: a head that lacks one loads, with random numbers in its place."""
    from safetensors.torch import load_file, save_file

    folder = Path(job["scratch"]) / "lacking"
    shutil.copytree(job["head"], folder)
    weights = load_file(folder / "model.safetensors")
    del weights["midlayer.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    try:
        load(job, str(folder))
    except RuntimeError:
        return None
    return "a head without midlayer.mlp.down_proj.weight loaded without a word"


def single_file_target_is_not_read(job):
    """A head without an embedding takes the target's, looked for in an index that targets of one file do not have."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        load(job, job["plain_head"])
    except (
        HFValidationError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
    ) as error:  # it asks the Hub for the index
        return f"loading fails: {type(error).__name__}: {str(error).splitlines()[0].replace(job['base'], 'TARGET')[:80]}"
    return None


def choosing_a_tree_needs_cuda(job):
    """total_token=-1 measures with CUDA only."""
    import torch

    if torch.cuda.is_available():
        return None
    try:
        load(job, total_token=-1)
    except (AssertionError, RuntimeError) as error:
        if "CUDA" not in str(error):
            raise
        return f"total_token=-1 on a CPU fails: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return None


FAULTS = (
    seed_does_not_repeat, cap_is_passed, text_goes_on_behind_its_end, coin_of_zero_accepts_the_impossible, cache_keeps_the_first_length,
    wrong_head_loads, single_file_target_is_not_read, choosing_a_tree_needs_cuda,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "job",
        help="JSON file: eagle, base, head, plain_head (without an embedding), scratch (a folder)",
    )
    job = json.loads(Path(parser.parse_args().job).read_text(encoding="utf-8"))
    sys.path[0] = job["eagle"]  # in place of this file's folder, whose names would hide others
    for fault in FAULTS:
        seen = fault(job)
        print(
            "RECORD " + json.dumps({"fault": fault.__name__, "about": fault.__doc__, "seen": seen}),
            flush=True,
        )


if __name__ == "__main__":
    main()
