"""Run an EAGLE checkout and print what it does, cycle by cycle, as JSON.

``evaluation.diff_upstream`` starts this program with the Python of EAGLE's own environment, whose
transformers is older. So this file imports nothing of this project but RheoSampling for EAGLE, and
that only if the job asks for it. The checkout stays as it is: the draft head's tree function is
observed while it runs.
"""

import argparse
import json
import random
import sys
import time


class Observer:
    """Records the cycles of an EAGLE model, and the time spent inside its networks.

    Args:
        model: EAGLE's model.
        trees: whether trees are recorded; otherwise only the context of each cycle.

    Attributes:
        cycles: the cycles since ``reset``.
        inside: seconds inside the networks since ``reset``.
        own: seconds that the recording took since ``reset``, which are not EAGLE's.
    """

    def __init__(self, model, trees):
        self.trees, self.started = trees, 0.0
        self.reset()
        head = model.ea_layer
        self.draft = head.topK_genrate
        head.topK_genrate = self.observed_draft
        target = (model.base_model.model, model.base_model.lm_head)
        for module in (*target, head.fc, head.midlayer, head.norm, head.lm_head):
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(self.leave)

    def reset(self):
        """Forget everything."""
        self.cycles, self.inside, self.own = [], 0.0, 0.0

    def enter(self, *_):
        """A network begins."""
        self.started = time.perf_counter()

    def leave(self, *_):
        """A network ends."""
        self.inside += time.perf_counter() - self.started

    def observed_draft(self, hidden_states, input_ids, head, logits_processor):
        """Replace ``topK_genrate``: call it and record its tree."""
        import torch

        # The last topk in that function chooses the kept nodes; its values are the path scores.
        found, topk = [], torch.topk

        def recorded_topk(*args, **kwargs):
            found.append(topk(*args, **kwargs))
            return found[-1]

        torch.topk = recorded_topk
        try:
            tree = self.draft(hidden_states, input_ids, head, logits_processor)
        finally:
            torch.topk = topk
        start = time.perf_counter()
        cycle = {"context": input_ids.shape[1] - 1}  # tokens before the root
        if self.trees:
            order = found[-1].indices.sort().indices
            tokens, _, mask, positions = tree
            cycle["tokens"] = tokens[0].tolist()
            cycle["positions"] = positions.tolist()
            cycle["mask"] = mask[0, 0].bool().tolist()
            cycle["scores"] = [0.0, *found[-1].values[order].tolist()]
        self.cycles.append(cycle)
        self.own += time.perf_counter() - start
        return tree


def answer(model, observer, prompt, seed, settings):
    """Generate once; returns what was seen."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)  # EAGLE's verification takes its uniforms from Python's generator
    observer.reset()
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    output, new_token, idx = model.eagenerate(ids, log=True, **settings)
    seconds = time.perf_counter() - start - observer.own
    return {
        "seed": seed,
        "output": output[0].tolist(),
        "new_token": int(new_token),
        "cycles_run": idx + 1,
        "seconds": seconds,
        "inside": observer.inside,
        # EAGLE drafts one more tree after its last cycle.
        "cycles": observer.cycles,
    }


def main():
    """Run the job and print one record per prompt and seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    keys = "eagle, base, head, prompts, seeds, temperature, max_new_tokens, max_length, threads"
    trees = "total_token, depth, top_k; rheo and project for RheoSampling in EAGLE"
    parser.add_argument("job", help=f"JSON file with {keys}, {trees}")
    with open(parser.parse_args().job, encoding="utf-8") as file:
        job = json.load(file)
    sys.path[0] = job["eagle"]  # this file's folder has modules whose names would hide others
    import torch

    from eagle.model.ea_model import EaModel

    torch.set_num_threads(job["threads"])
    model = EaModel.from_pretrained(
        base_model_path=job["base"],
        ea_model_path=job["head"],
        total_token=job["total_token"],
        depth=job["depth"],
        top_k=job["top_k"],
        torch_dtype=torch.float32,
    )
    model.eval()
    rheo = job.get("rheo")
    if rheo is not None:
        sys.path.append(job["project"])  # after EAGLE's folder: both have a package named eagle
        from rheo.integrations.eagle import enable

        enable(model, **rheo)
    observer = Observer(model, trees=rheo is None)
    settings = {name: job[name] for name in ("temperature", "max_new_tokens", "max_length")}
    warm_up = settings | {"max_new_tokens": 4}
    model.eagenerate(torch.tensor([job["prompts"][0]]), **warm_up)
    for number, prompt in enumerate(job["prompts"]):
        for seed in job["seeds"]:
            record = {"prompt": number, **answer(model, observer, prompt, seed, settings)}
            print("RECORD " + json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
