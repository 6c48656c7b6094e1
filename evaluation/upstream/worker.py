"""Runs an EAGLE checkout and writes down what it does, cycle by cycle, as JSON on standard output.

Started by ``evaluation.diff_upstream`` with the Python of EAGLE's own environment, whose transformers is older: so this file
stands alone and imports nothing of this project. It changes nothing in the checkout; it looks at the head's tree function while it runs.
"""

import argparse
import json
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "job",
        help="JSON file: eagle, base, head, prompts, seeds, temperature, max_new_tokens, total_token, depth, top_k",
    )
    with open(parser.parse_args().job, encoding="utf-8") as file:
        job = json.load(file)
    sys.path[0] = job["eagle"]  # in place of this file's folder, whose names would hide others
    import torch

    from eagle.model.ea_model import EaModel

    torch.set_num_threads(job["threads"])
    model = EaModel.from_pretrained(
        base_model_path=job["base"], ea_model_path=job["head"], total_token=job["total_token"], depth=job["depth"],
        top_k=job["top_k"], torch_dtype=torch.float32,
    )  # fmt: skip
    model.eval()
    if job.get("rheo") is not None:
        sys.path.append(job["project"])  # behind EAGLE's folder: both have a package named eagle
        import rheo.integrations.eagle

        rheo.upstream.enable(model, **job["rheo"])
    cycles, draft = [], model.ea_layer.topK_genrate

    def watched(hidden_states, input_ids, head, logits_processor):
        # The last call of topk in the function picks the kept candidates: its values are the path scores.
        picked, topk = [], torch.topk

        def keep_scores(*args, **kwargs):
            found = topk(*args, **kwargs)
            picked.append(found)
            return found

        torch.topk = keep_scores
        try:
            tree = draft(hidden_states, input_ids, head, logits_processor)
        finally:
            torch.topk = topk
        began = time.perf_counter()
        if job.get("rheo") is not None:
            cycles.append({"context": input_ids.shape[1] - 1})
            return tree
        order = picked[-1].indices.sort().indices
        tokens, _, mask, positions = tree
        cycles.append({
            "context": input_ids.shape[1] - 1,  # tokens before the root
            "tokens": tokens[0].tolist(),
            "positions": positions.tolist(),
            "mask": mask[0, 0].bool().tolist(),
            "scores": [0.0, *picked[-1].values[order].tolist()],
        })  # fmt: skip
        watching[0] += time.perf_counter() - began
        return tree

    model.ea_layer.topK_genrate = watched
    watching = [0.0]  # seconds of what is written down here, which are not EAGLE's
    inside = [0.0, 0.0]  # seconds in the networks, and when the one that runs was entered

    def enter(*_):
        inside[1] = time.perf_counter()

    def leave(*_):
        inside[0] += time.perf_counter() - inside[1]

    head = model.ea_layer
    for module in (
        model.base_model.model,
        model.base_model.lm_head,
        head.fc,
        head.midlayer,
        head.norm,
        head.lm_head,
    ):
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    model.eagenerate(
        torch.tensor([job["prompts"][0]]),
        temperature=job["temperature"],
        max_new_tokens=4,
        max_length=job["max_length"],
    )  # warm-up
    for number, prompt in enumerate(job["prompts"]):
        for seed in job["seeds"]:
            torch.manual_seed(seed)
            __import__("random").seed(
                seed
            )  # its verification draws its coins from Python's generator
            cycles.clear()
            inside[0] = watching[0] = 0.0
            ids = torch.tensor([prompt])
            start = time.perf_counter()
            output, new_token, idx = model.eagenerate(
                ids,
                temperature=job["temperature"],
                max_new_tokens=job["max_new_tokens"],
                max_length=job["max_length"],
                log=True,
            )
            seconds = time.perf_counter() - start - watching[0]
            # After its last cycle it drafts once more, for a cycle that does not come.
            record = {
                "prompt": number,
                "seed": seed,
                "output": output[0].tolist(),
                "new_token": int(new_token),
                "cycles_run": idx + 1,
            }
            print(
                "RECORD "
                + json.dumps(record | {"seconds": seconds, "inside": inside[0], "cycles": cycles}),
                flush=True,
            )


if __name__ == "__main__":
    main()
