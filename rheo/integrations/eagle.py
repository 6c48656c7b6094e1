"""RheoSampling inside a checkout of SafeAILab/EAGLE, whose files stay as they are.

    python -m rheo.upstream PATH_TO_EAGLE -- -m eagle.evaluation.gen_ea_answer_llama3chat ... --sampling rheo --m 1

runs EAGLE's own program with its own environment (torch is all that is needed besides). For a live model:

    import rheo.integrations.eagle
    rheo.upstream.enable(model, m=1)      # an EaModel of EAGLE with an EAGLE-3 head

Two functions are replaced at run time: the head's ``topK_genrate``, which builds the tree, and ``evaluate_posterior``, which verifies it.
Randomness comes from torch's global generator, which EAGLE's programs seed. Made for EAGLE's commit cb7e084.
"""

import argparse
import importlib
import inspect
import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.pool import PoolOptions, parse_m
from rheo.tree import Tree, TreeOptions, build_tree
from rheo.verification import VERIFICATIONS, check_verification, verify

COMMIT = "cb7e084"
TREE_SIGNATURE = ("self", "hidden_states", "input_ids", "head", "logits_processor")
VERIFY_SIGNATURE = ("logits", "candidates", "logits_processor")


class RheoInEagle:
    """Drafts and verifies for one EAGLE model.

    Args:
        layer: EAGLE's draft network (``model.ea_layer``); its tree sizes are used.
        m, support, verification: as in ``PoolOptions`` and ``verify``.
    """

    def __init__(self, layer: torch.nn.Module, m: int | str, support: int, verification: str):
        check_verification(verification, m)
        PoolOptions(layer.top_k, m, support)  # checks them now, not in the first cycle
        self.layer, self.m, self.support, self.verification = layer, m, support, verification
        self.draws = Draws(None)
        self.target_ids = None
        if layer.config.vocab_size != layer.config.draft_vocab_size:
            self.target_ids = torch.arange(layer.d2t.numel(), device=layer.d2t.device) + layer.d2t
        self.tree: Tree | None = None
        self.positions: Tensor | None = (
            None  # [N, 2] row and column of ``retrieve_indices`` where each node stands
        )

    @torch.no_grad()
    def draft(
        self, hidden_states: Tensor, input_ids: Tensor, head, logits_processor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In place of ``topK_genrate``: drafted tokens ``[1, N]``, paths ``[leaves, depth]``, mask ``[1, 1, N, N]``, positions ``[N]``."""
        layer, device = self.layer, hidden_states.device
        input_ids = input_ids.to(device)
        root, input_ids = input_ids[0, -1], input_ids[:, 1:]
        length = input_ids.shape[1]
        layer.reset()
        known = getattr(layer, "stable_kv", None)
        fresh = input_ids if known is None else input_ids[:, known[0][0].shape[2] :]
        out, past = layer(hidden_states, input_ids=fresh, past_key_values=known, use_cache=True)
        layer.stable_kv = past
        hidden = out[0, -1:]
        seen = torch.zeros(1, 0, dtype=torch.bool, device=device)

        def expand(tokens: Tensor, ranks: Tensor, level: int) -> Tensor:
            nonlocal hidden, past, seen
            itself = torch.eye(tokens.numel(), dtype=torch.bool, device=device)
            seen = torch.cat((seen[ranks], itself), 1)
            layer.tree_mask = seen.float()[None, None]
            positions = torch.full_like(tokens, length + level - 1)
            out, past = layer(
                hidden[ranks][None],
                input_ids=tokens[None],
                past_key_values=past,
                position_ids=positions,
                use_cache=True,
            )
            hidden = out[0]
            return layer.lm_head(layer.norm(hidden))

        pool = PoolOptions(layer.top_k, self.m, self.support, temperature_of(logits_processor))
        options = TreeOptions(pool, layer.total_tokens + 1, layer.depth)
        self.tree = tree = build_tree(
            root, layer.lm_head(layer.norm(hidden))[0], expand, options, self.draws, self.target_ids
        )
        paths = leaf_paths(tree)
        self.positions = torch.zeros(tree.tokens.numel(), 2, dtype=torch.long)
        for row, path in enumerate(paths.tolist()):
            for column, node in enumerate(path):
                if node >= 0:
                    self.positions[node] = torch.tensor([row, column])
        return tree.tokens[None], paths, tree.mask.float()[None, None], tree.levels

    def verify(
        self, logits: Tensor, candidates: Tensor, logits_processor
    ) -> tuple[Tensor, int, Tensor]:
        """In place of ``evaluate_posterior``: the path taken, how many drafted tokens were accepted, and the law of the bonus token.

        That law has all its mass on the token that verification has drawn: EAGLE draws from it once more.
        """

        def probs(node: Tensor) -> Tensor:
            row, column = self.positions[int(node)].tolist()
            here = logits[row, column].float()
            if logits_processor is None:
                return torch.zeros_like(here).scatter_(0, here.argmax(0, keepdim=True), 1)
            return logits_processor(None, here[None])[0].softmax(-1)

        verified = verify(self.tree, probs, self.draws, self.verification)
        count = int(verified.count)
        if not verified.finite:
            raise RuntimeError(
                f"the target's logits hold NaN or infinity in {logits.dtype}; use bfloat16 or float32"
            )
        row = self.positions[int(verified.path[count - 1])][0]
        bonus = torch.zeros(logits.shape[-1], device=logits.device).scatter_(
            0, verified.tokens[count - 1].reshape(1).to(logits.device), 1
        )
        return row.to(candidates.device), count - 1, bonus


def temperature_of(logits_processor) -> float:
    """The temperature among EAGLE's processors; 1 where none is listed, 0 for greedy decoding."""
    if logits_processor is None:
        return 0.0
    return next((float(p.temperature) for p in logits_processor if hasattr(p, "temperature")), 1.0)


def leaf_paths(tree: Tree) -> Tensor:
    """int64 ``[leaves, depth]``: the nodes from the root to each leaf, filled up with -1."""
    parents, levels, valid = tree.parents.tolist(), tree.levels.tolist(), tree.valid.tolist()
    inner = {parent for parent, level, real in zip(parents, levels, valid) if real and level}
    paths = []
    for node in range(len(parents)):
        if valid[node] and node not in inner:
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            paths.append(path)
    width = max(map(len, paths))
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths])


def enable(model, m: int = 1, support: int = 128, verification: str = "rheo"):
    """Make an EAGLE ``EaModel`` decode by RheoSampling; returns the model.

    Raises:
        ValueError: for a model that is not EAGLE's with an EAGLE-3 head, or whose functions do not have the expected signatures.
    """
    module = sys.modules[type(model).__module__]
    found = {
        "ea_layer.topK_genrate": (
            getattr(type(getattr(model, "ea_layer", None)), "topK_genrate", None),
            TREE_SIGNATURE,
        ),
        "evaluate_posterior": (getattr(module, "evaluate_posterior", None), VERIFY_SIGNATURE),
    }
    for name, (function, expected) in found.items():
        signature = tuple(inspect.signature(function).parameters) if function else None
        if getattr(function, "rheo", False):
            signature = expected  # replaced by an earlier call
        if signature != expected:
            raise ValueError(
                f"{name} of this EAGLE has the arguments {signature}, expected {expected}; this was made for commit {COMMIT}"
            )
    if not getattr(model, "use_eagle3", False):
        raise ValueError(
            "this EAGLE model has an EAGLE-1 or EAGLE-2 head; RheoSampling is made for EAGLE-3"
        )
    ours = RheoInEagle(model.ea_layer, m, support, verification)
    drafter: list[RheoInEagle] = getattr(module.evaluate_posterior, "drafter", None) or []
    if not drafter:
        original = module.evaluate_posterior

        def evaluate_posterior(logits, candidates, logits_processor):
            # The tree under verification is the one drafted last; a model that is not enabled drafts by itself.
            return (drafter[0].verify if drafter[0] else original)(
                logits, candidates, logits_processor
            )

        evaluate_posterior.rheo, evaluate_posterior.drafter = True, drafter
        module.evaluate_posterior = evaluate_posterior
        drafter.append(None)
        _remember_others(type(model.ea_layer), drafter)

    def draft(hidden_states, input_ids, head, logits_processor):
        drafter[0] = ours
        return ours.draft(hidden_states, input_ids, head, logits_processor)

    model.ea_layer.topK_genrate = draft
    return model


def _remember_others(layer_class: type, drafter: list) -> None:
    """Models of the same process that are not enabled go on with EAGLE's own verification."""
    original = layer_class.topK_genrate

    def topK_genrate(self, hidden_states, input_ids, head, logits_processor):
        drafter[0] = None
        return original(self, hidden_states, input_ids, head, logits_processor)

    topK_genrate.rheo = True
    layer_class.topK_genrate = topK_genrate


def main(argv: list[str] | None = None) -> None:
    """Run a program of an EAGLE checkout with RheoSampling."""
    parser = argparse.ArgumentParser(
        prog="python -m rheo.upstream", description="Run a program of an EAGLE checkout with RheoSampling.", allow_abbrev=False,
        usage="%(prog)s PATH_TO_EAGLE [--sampling rheo|topk] [--m M] [--support S] [--verification rheo|rrsw] -- (-m MODULE | FILE) ...",
    )  # fmt: skip
    parser.add_argument("eagle", type=Path)
    parser.add_argument(
        "--sampling", choices=("rheo", "topk"), default="rheo", help="topk leaves EAGLE as it is"
    )
    parser.add_argument("--m", type=parse_m, default=1)
    parser.add_argument("--support", type=int, default=128)
    parser.add_argument("--verification", choices=VERIFICATIONS, default="rheo")
    argv = sys.argv[1:] if argv is None else argv
    args, theirs = parser.parse_known_args([argument for argument in argv if argument != "--"])
    if not (args.eagle / "eagle/model/ea_model.py").is_file():
        parser.error(f"{args.eagle} is no checkout of EAGLE (this was made for commit {COMMIT})")
    if not theirs or theirs == ["-m"]:
        parser.error("EAGLE's own command line is missing: -m MODULE or FILE, and its arguments")
    sys.path.insert(0, str(args.eagle.resolve()))
    if args.sampling == "rheo":
        model_class = importlib.import_module("eagle.model.ea_model").EaModel
        load = model_class.from_pretrained.__func__

        def from_pretrained(cls, *positional, **keywords):
            return enable(
                load(cls, *positional, **keywords), args.m, args.support, args.verification
            )

        model_class.from_pretrained = classmethod(from_pretrained)
    if theirs[0] == "-m":
        sys.argv = theirs[1:]
        runpy.run_module(theirs[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = theirs
        runpy.run_path(theirs[0], run_name="__main__")


if __name__ == "__main__":
    main()
