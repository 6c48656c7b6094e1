"""Show faults of an EAGLE checkout by running it.

``evaluation.diff_upstream --faults`` starts this program with the Python of EAGLE's own
environment, so it imports nothing of this project. Each function in ``FAULTS`` provokes one fault
on a tiny random pair. It returns what was seen, or None if the checkout behaves as expected.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

PROMPT = [5, 9, 13, 7]


def load(job, head=None, **settings):
    """EAGLE's model of the job's pair.

    Args:
        job: the program's input.
        head: another draft head.
        settings: keywords of ``from_pretrained``.
    """
    from eagle.model.ea_model import EaModel

    settings = {"total_token": 12, "depth": 3, "top_k": 4} | settings
    head = head or job["head"]
    return EaModel.from_pretrained(
        base_model_path=job["base"], ea_model_path=head, **settings
    ).eval()


def run(model, prompt=PROMPT, **settings):
    """The new token ids of one request."""
    import torch

    settings = {"temperature": 0.0, "max_new_tokens": 24, "max_length": 256} | settings
    return model.eagenerate(torch.tensor([prompt]), **settings)[0].tolist()[len(prompt) :]


def message(error, length=None):
    """Type and first line of an error, the line cut to ``length`` characters."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:length]}"


def seed_does_not_repeat(job):
    """torch.manual_seed alone does not repeat a run: uniforms come from Python's generator."""
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
    """max_new_tokens is checked after a cycle, so a text may be longer."""
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
        for i, token in enumerate(text):
            if token in text[:i]:
                continue
            model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(token)
            cut = run(model, prompt)
            if len(cut) > i + 1 and cut[: i + 1] == text[: i + 1]:
                more = len(cut) - i - 1
                return f"the stop token is token {i + 1} of the text, and {more} more follow it"
    return None


def uniform_of_zero_accepts_the_impossible(job):
    """A uniform r accepts if r <= p. It can be exactly 0, which accepts a token of p = 0."""
    import torch
    from eagle.model.utils import evaluate_posterior, prepare_logits_processor

    logits = torch.full((1, 2, 4), -float("inf"))
    logits[..., 2] = 0  # the target's only token is 2; the candidate is token 1
    uniform, random.random = random.random, lambda: 0.0
    try:
        processor = prepare_logits_processor(temperature=1.0)
        _, accepted, _ = evaluate_posterior(logits, torch.tensor([[0, 1]]), processor)
    finally:
        random.random = uniform
    seen = "a drafted token of probability 0 was accepted at a uniform of 0.0"
    return seen if int(accepted) == 1 else None


def cache_keeps_the_first_length(job):
    """The first request makes the cache, with its max_length: a longer one later does not fit."""
    model = load(job)
    run(model, max_length=64, max_new_tokens=4)
    try:
        run(model, prompt=PROMPT * 25, max_length=256, max_new_tokens=4)
    except RuntimeError as error:
        return f"a prompt of 100 tokens after a request with max_length=64: {message(error)}"
    return None


def wrong_head_loads(job):
    """Heads load with strict=False, unchecked: a missing weight stays random."""
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
    return "a head without midlayer.mlp.down_proj.weight loaded without a message"


def single_file_target_is_not_read(job):
    """The target's embedding is looked for in an index, which targets of one file do not have."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # EAGLE asks the Hub for the index.
    errors = HFValidationError, HfHubHTTPError, LocalEntryNotFoundError
    try:
        load(job, job["plain_head"])
    except errors as error:
        return f"loading fails: {message(error).replace(job['base'], 'TARGET')[:110]}"
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
        return f"total_token=-1 on a CPU fails: {message(error, 80)}"
    return None


FAULTS = (
    seed_does_not_repeat,
    cap_is_passed,
    text_goes_on_behind_its_end,
    uniform_of_zero_accepts_the_impossible,
    cache_keeps_the_first_length,
    wrong_head_loads,
    single_file_target_is_not_read,
    choosing_a_tree_needs_cuda,
)


def main():
    """Try all faults and print one record for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    keys = "eagle, base, head, plain_head (without an embedding) and scratch (a folder)"
    parser.add_argument("job", help=f"JSON file with {keys}")
    job = json.loads(Path(parser.parse_args().job).read_text(encoding="utf-8"))
    sys.path[0] = job["eagle"]  # this file's folder has modules whose names would hide others
    for fault in FAULTS:
        record = {"fault": fault.__name__, "about": fault.__doc__, "seen": fault(job)}
        print("RECORD " + json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
