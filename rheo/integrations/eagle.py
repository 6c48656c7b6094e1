"""RheoSampling inside a checkout of SafeAILab/EAGLE, whose files stay unchanged.

To run a program of EAGLE in EAGLE's own environment, which needs nothing besides torch:

    python -m rheo.upstream PATH_TO_EAGLE --m 1 -- -m eagle.evaluation.gen_ea_answer_llama3chat ...

To change a loaded model, an ``EaModel`` of EAGLE with an EAGLE-3 head:

    from rheo.integrations.eagle import enable
    enable(model, m=1)

Two functions are replaced at run time: ``topK_genrate`` of the draft head, which builds the tree,
and ``evaluate_posterior``, which verifies it. Randomness comes from torch's global generator, which
EAGLE's programs seed. Made for EAGLE's revision cb7e084.
"""

import argparse
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.pool import PoolOptions, parse_m
from rheo.tree import Tree, TreeOptions, build_tree
from rheo.verification import VERIFICATIONS, check_verification, verify

REVISION = "cb7e084"
TREE_SIGNATURE = ("self", "hidden_states", "input_ids", "head", "logits_processor")
VERIFY_SIGNATURE = ("logits", "candidates", "logits_processor")
USAGE = (
    "%(prog)s PATH_TO_EAGLE [--sampling rheo|topk] [--m M] [--support S] "
    "[--verification rheo|rrsw] -- (-m MODULE | FILE) ..."
)


class RheoInEagle:
    """Drafts and verifies for one EAGLE model.

    Args:
        layer: EAGLE's draft head (``model.ea_layer``). Its tree sizes are used.
        m: as in ``PoolOptions``.
        support: as in ``PoolOptions``.
        verification: as in ``verify``.

    Raises:
        ValueError: for options that are out of range or not lossless.
    """

    def __init__(self, layer: Any, m: int | str, support: int, verification: str):
        check_verification(verification, m)
        PoolOptions(layer.top_k, m, support)  # checks the options now, not in the first cycle
        self.layer, self.m, self.support, self.verification = layer, m, support, verification
        self.draws = Draws(None)
        self.target_ids: Tensor | None = None
        if layer.config.vocab_size != layer.config.draft_vocab_size:
            self.target_ids = torch.arange(layer.d2t.numel(), device=layer.d2t.device) + layer.d2t
        self.tree: Tree  # the tree drafted last
        self.positions: list[tuple[int, int]]  # per node: its row and column in EAGLE's paths

    @torch.no_grad()
    def draft(
        self, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Build a tree in place of ``topK_genrate``.

        Args:
            hidden_states: the target's fused hidden states of the new tokens.
            input_ids: ``[1, L]`` all tokens.
            head: not used; the draft head has its own output layer.
            logits_processor: EAGLE's warpers; only the temperature is read.

        Returns:
            Tokens ``[1, N]``, paths ``[leaves, depth]``, mask ``[1, 1, N, N]``, levels ``[N]``.
        """
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
            out, past = layer(
                hidden[ranks][None],
                input_ids=tokens[None],
                past_key_values=past,
                position_ids=torch.full_like(tokens, length + level - 1),
                use_cache=True,
            )
            hidden = out[0]
            return layer.lm_head(layer.norm(hidden))

        pool = PoolOptions(layer.top_k, self.m, self.support, temperature_of(logits_processor))
        options = TreeOptions(pool, layer.total_tokens + 1, layer.depth)
        logits = layer.lm_head(layer.norm(hidden))[0]
        tree = build_tree(root, logits, expand, options, self.draws, self.target_ids)
        paths = leaf_paths(tree)
        found = {
            node: (row, column)
            for row, path in enumerate(paths.tolist())
            for column, node in enumerate(path)
        }
        self.tree = tree
        self.positions = [found.get(node, (0, 0)) for node in range(tree.tokens.numel())]
        return tree.tokens[None], paths, tree.mask.float()[None, None], tree.levels

    def verify(
        self, logits: Tensor, candidates: Tensor, logits_processor: Any
    ) -> tuple[Tensor, int, Tensor]:
        """Verify the last tree in place of ``evaluate_posterior``.

        Args:
            logits: ``[leaves, depth, V]`` the target's logits along the paths.
            candidates: ``[leaves, depth]`` the tokens along the paths.
            logits_processor: EAGLE's warpers; None for greedy decoding.

        Returns:
            The row of the accepted path, the number of accepted drafted tokens, and probabilities
            ``[V]`` that are 1 for the bonus token, because EAGLE samples from them once more.

        Raises:
            RuntimeError: if the target's logits hold NaN or infinity.
        """

        def probs(node: Tensor) -> Tensor:
            here = logits[self.positions[int(node)]].float()
            if logits_processor is None:
                return torch.zeros_like(here).scatter_(0, here.argmax(0, keepdim=True), 1)
            return logits_processor(None, here[None])[0].softmax(-1)

        verified = verify(self.tree, probs, self.draws, self.verification)
        if not verified.finite:
            raise RuntimeError(
                f"the target's logits hold NaN or infinity in {logits.dtype}; "
                "use bfloat16 or float32"
            )
        last = int(verified.count) - 1
        row, _ = self.positions[int(verified.path[last])]
        bonus = torch.zeros(logits.shape[-1], device=logits.device)
        bonus[int(verified.tokens[last])] = 1
        return torch.tensor(row, device=candidates.device), last, bonus


def temperature_of(logits_processor: Any) -> float:
    """The temperature of EAGLE's warpers; 1 if they hold none, 0 for greedy decoding."""
    if logits_processor is None:
        return 0.0
    return next((float(p.temperature) for p in logits_processor if hasattr(p, "temperature")), 1.0)


def leaf_paths(tree: Tree) -> Tensor:
    """The nodes from the root to each leaf, padded with -1; int64 ``[leaves, depth]``."""
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


class Switch:
    """Sends EAGLE's verification to whoever drafted the last tree.

    Enabled models and other models may live in one process. A model that is not enabled drafts and
    verifies with EAGLE's own functions.

    Args:
        module: the module of EAGLE's ``EaModel``. Its ``evaluate_posterior`` is replaced.
        layer_class: the class of EAGLE's draft head. Its ``topK_genrate`` is replaced.

    Attributes:
        drafter: what drafted the last tree; None for EAGLE itself.
    """

    def __init__(self, module: Any, layer_class: Any):
        self.drafter: RheoInEagle | None = None
        eagle_verifies, eagle_drafts = module.evaluate_posterior, layer_class.topK_genrate

        def evaluate_posterior(logits, candidates, logits_processor):
            decide = self.drafter.verify if self.drafter else eagle_verifies
            return decide(logits, candidates, logits_processor)

        def topK_genrate(layer, hidden_states, input_ids, head, logits_processor):
            self.drafter = None
            return eagle_drafts(layer, hidden_states, input_ids, head, logits_processor)

        module.evaluate_posterior, layer_class.topK_genrate = evaluate_posterior, topK_genrate


def enable(model: Any, m: int | str = 1, support: int = 128, verification: str = "rheo") -> Any:
    """Make an EAGLE ``EaModel`` decode with RheoSampling.

    Args:
        model: EAGLE's model with an EAGLE-3 head.
        m: as in ``PoolOptions``.
        support: as in ``PoolOptions``.
        verification: as in ``verify``.

    Returns:
        The model.

    Raises:
        ValueError: for another model, for functions with other arguments than expected, and for
            options that are out of range or not lossless.
    """
    module: Any = sys.modules[type(model).__module__]
    if not hasattr(module, "rheo_switch"):
        layer_class = type(getattr(model, "ea_layer", None))
        drafts = getattr(layer_class, "topK_genrate", None)
        check_signature("ea_layer.topK_genrate", drafts, TREE_SIGNATURE)
        verifies = getattr(module, "evaluate_posterior", None)
        check_signature("evaluate_posterior", verifies, VERIFY_SIGNATURE)
    if not getattr(model, "use_eagle3", False):
        raise ValueError(
            "this EAGLE model has an EAGLE-1 or EAGLE-2 head; RheoSampling needs an EAGLE-3 head"
        )
    ours = RheoInEagle(model.ea_layer, m, support, verification)
    if not hasattr(module, "rheo_switch"):
        module.rheo_switch = Switch(module, type(model.ea_layer))
    switch = module.rheo_switch

    def topK_genrate(hidden_states, input_ids, head, logits_processor):
        switch.drafter = ours
        return ours.draft(hidden_states, input_ids, head, logits_processor)

    model.ea_layer.topK_genrate = topK_genrate
    return model


def check_signature(name: str, function: Callable | None, expected: tuple[str, ...]) -> None:
    """Check that a function of EAGLE takes the expected arguments.

    Raises:
        ValueError: if it does not, or if there is no such function.
    """
    found = tuple(inspect.signature(function).parameters) if function else None
    if found != expected:
        raise ValueError(
            f"{name} of this EAGLE has the arguments {found}, expected {expected}; "
            f"this was made for revision {REVISION}"
        )


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, which leaves EAGLE's own arguments alone."""
    parser = argparse.ArgumentParser(
        prog="python -m rheo.upstream",
        description="Run a program of an EAGLE checkout with RheoSampling.",
        usage=USAGE,
        allow_abbrev=False,
    )
    sampling = "topk leaves EAGLE unchanged (default: %(default)s)"
    parser.add_argument("eagle", type=Path, help="folder of the checkout")
    parser.add_argument("--sampling", choices=("rheo", "topk"), default="rheo", help=sampling)
    parser.add_argument("--m", type=parse_m, default=1, help='number of lead slots, or "auto"')
    support = "highest draft logits that carry the draft distribution; 0 for all"
    parser.add_argument("--support", type=int, default=128, help=support)
    verification = "rrsw is the paper's baseline (default: %(default)s)"
    parser.add_argument("--verification", choices=VERIFICATIONS, default="rheo", help=verification)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run a program of an EAGLE checkout with RheoSampling."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args, theirs = parser.parse_known_args([argument for argument in argv if argument != "--"])
    if not (args.eagle / "eagle/model/ea_model.py").is_file():
        parser.error(f"{args.eagle} is no checkout of EAGLE (made for revision {REVISION})")
    if not theirs or theirs == ["-m"]:
        parser.error("EAGLE's own command line is missing: -m MODULE or FILE, and its arguments")
    sys.path.insert(0, str(args.eagle.resolve()))
    if args.sampling == "rheo":
        enable_all(args.m, args.support, args.verification)
    if theirs[0] == "-m":
        sys.argv = theirs[1:]
        runpy.run_module(theirs[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = theirs
        runpy.run_path(theirs[0], run_name="__main__")


def enable_all(m: int | str, support: int, verification: str) -> None:
    """Enable every model that EAGLE loads from now on; arguments as in ``enable``."""
    model_class = importlib.import_module("eagle.model.ea_model").EaModel
    load = model_class.from_pretrained.__func__

    def from_pretrained(cls, *positional, **keywords):
        return enable(load(cls, *positional, **keywords), m, support, verification)

    model_class.from_pretrained = classmethod(from_pretrained)


if __name__ == "__main__":
    main()
