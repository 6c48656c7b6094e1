"""``EaModel``: a target and its EAGLE-3 draft head behind EAGLE's calls.

from eagle.model.ea_model import EaModel

model = EaModel.from_pretrained(base_model_path="smollm2-demo")
ids = model.tokenizer.apply_chat_template(
    [{"role": "user", "content": "Why is the sky blue?"}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=False,
)
output = model.eagenerate(ids, temperature=1.0, sampling="rheo", m=1, max_new_tokens=64)
print(model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle.model.cuda_graph import Graphs, can_use_graphs
from eagle.model.decoding import Generation, decode
from eagle.model.demo import DEMO_NAME, demo_head_path, demo_target_path
from eagle.model.draft import DraftModel, load_draft
from eagle.model.linear import pack_linears
from eagle.model.loading import load_causal_lm, load_tokenizer
from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from eagle.model.target import TargetModel
from eagle.model.tokens import chat_ids, chat_text, stop_token_ids
from eagle.model.tuning.tree_size import choose_tree


class EaModel:
    """EAGLE-3 speculative decoding of one target with one draft head.

    Args:
        base_model: a causal language model of transformers.
        draft: its EAGLE-3 draft head; None allows plain decoding only.
        tokenizer: used for the chat template's end-of-turn token, and kept for callers.
        total_token: nodes of the draft tree, the root included; -1 chooses it by measurement.
        depth: expansions of the tree after its first level; -1 chooses it by measurement.
        top_k: slots of a candidate pool (EAGLE's name; ``tree_top_k`` in the calls).
        cuda_graph: on a single GPU, run cycles as CUDA graphs.

    Raises:
        ValueError: for an unsupported target, or sizes of a tree that are not possible.
    """

    def __init__(
        self,
        base_model: PreTrainedModel,
        draft: DraftModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        cuda_graph: bool = True,
    ):
        self.base_model, self.draft, self.tokenizer = base_model, draft, tokenizer
        self.target = TargetModel(base_model)
        self.stop_ids = stop_token_ids(base_model, tokenizer)
        self.graphs = Graphs() if cuda_graph and can_use_graphs(self.target) else None
        if -1 in (total_token, depth):
            if draft is None:
                raise ValueError(
                    f"total_token={total_token}, depth={depth}: -1 chooses the tree for a draft "
                    "head, and none is loaded; give ea_model_path to from_pretrained"
                )
            prompt = sample_prompt(self.target, tokenizer)
            total_token, depth = choose_tree(
                self.target,
                draft,
                prompt,
                None if total_token == -1 else total_token,
                None if depth == -1 else depth,
                top_k,
            )
        self.tree_defaults = {"total_token": total_token, "depth": depth, "tree_top_k": top_k}
        self.options()  # checks the sizes

    @classmethod
    def from_pretrained(
        cls,
        base_model_path: str | None = None,
        ea_model_path: str | None = None,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        *,
        use_eagle3: bool = True,
        threshold: float = 1.0,
        dtype: str | torch.dtype = "auto",
        torch_dtype: str | torch.dtype | None = None,
        device_map="auto",
        cuda_graph: bool = True,
        pack_weights: bool = True,
        **kwargs,
    ) -> "EaModel":
        """Load a target and its draft head. All of EAGLE's keywords are accepted.

        Args:
            base_model_path: Hub id, folder or ``.gguf`` file of the target. "smollm2-demo" is the
                demo pair.
            ea_model_path: Hub id or folder of the draft head. None loads the target alone, or with
                the demo target its own head.
            total_token: nodes of the draft tree, the root included; -1 chooses it by measurement.
            depth: expansions of the tree after its first level; -1 chooses it by measurement.
            top_k: slots of a candidate pool.
            use_eagle3: EAGLE's switch; only True is supported.
            threshold: EAGLE's keyword; only its default, 1.0, has a meaning here.
            dtype: dtype of both networks: "auto" (as stored), "bf16", "fp16", "fp32", "fast"
                (bf16 if the hardware has instructions for it, else fp32), or a torch dtype.
            torch_dtype: EAGLE's name for ``dtype``.
            device_map: as in transformers.
            cuda_graph: on a single GPU, run cycles as CUDA graphs.
            pack_weights: on a CPU, store the weights of linear layers in the layout that its
                matrix products use (see ``eagle.model.linear``). Packed networks can be neither
                moved nor trained.
            kwargs: for the target's ``from_pretrained``.

        Raises:
            ValueError: for EAGLE-1/2 heads, a head that does not fit, or an unsupported target.
        """
        if not use_eagle3:
            raise ValueError(
                "use_eagle3=False asks for an EAGLE-1/2 head; only EAGLE-3 heads are supported"
            )
        if threshold != 1.0:
            raise ValueError(f"threshold is {threshold}; only 1.0 is supported")
        if base_model_path is None or isinstance(base_model_path, bool):
            raise ValueError(
                "base_model_path is missing (use_eagle3 is given by its name); give a Hub id, a "
                f"folder, a .gguf file or {DEMO_NAME!r}"
            )
        if base_model_path == DEMO_NAME:
            base_model_path, ea_model_path = demo_target_path(), ea_model_path or demo_head_path()
        base_model = load_causal_lm(base_model_path, torch_dtype or dtype, device_map, **kwargs)
        tokenizer = load_tokenizer(base_model_path, kwargs)
        draft = None
        if ea_model_path is not None:
            target = TargetModel(base_model)
            draft = load_draft(
                ea_model_path, target.hidden_size, target.vocab_size, len(target.layers)
            )
            draft.to(device=target.device, dtype=target.dtype)
        if pack_weights:
            for network in filter(None, (base_model, draft)):
                pack_linears(network)
        return cls(base_model, draft, tokenizer, total_token, depth, top_k, cuda_graph)

    def eval(self) -> "EaModel":
        """Return the model: it is always in evaluation mode (EAGLE's programs call this)."""
        return self

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the target's tokenizer (EAGLE's name for it)."""
        return self.tokenizer

    def options(
        self,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        min_p: float = 0.0,
        *,
        max_new_tokens: int = 512,
        max_length: int | None = None,
        sampling: str = "topk",
        m: int | str | None = None,
        support: int | None = None,
        verification: str | None = None,
        normaliser: str | None = None,
        total_token: int | None = None,
        depth: int | None = None,
        tree_top_k: int | None = None,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> DecodingOptions:
        """The options of a request; the arguments are those of ``eagenerate``.

        Raises:
            ValueError: for an invalid value.
        """
        tree = self.tree_defaults
        return DecodingOptions(
            warpers=WarperOptions(temperature, top_k, top_p, min_p),
            sampling=sampling,
            m=m,
            support=support,
            verification=verification,
            normaliser=normaliser,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            total_token=tree["total_token"] if total_token is None else total_token,
            depth=tree["depth"] if depth is None else depth,
            tree_top_k=tree["tree_top_k"] if tree_top_k is None else tree_top_k,
        )

    def stream(
        self, input_ids: Tensor, options: DecodingOptions, timing: bool = False
    ) -> Iterator[Generation]:
        """Decode; yields the growing result after every cycle, the same object each time.

        Args:
            input_ids: int64 ``[1, L]`` or ``[L]`` prompt.
            options: from ``options``.
            timing: wait for the device after every phase, so that seconds are right on a GPU, too.

        Raises:
            ValueError: if drafting is asked for and no draft head is loaded; from the first item
                on, for a prompt that cannot be decoded.
            NonFiniteLogits: if the target's logits are NaN or infinite.
        """
        if options.sampling != "none" and self.draft is None:
            raise ValueError(
                f"sampling {options.sampling!r} needs a head: give ea_model_path to from_pretrained"
            )
        return decode(
            self.target, self.draft, input_ids, options, self.stop_ids, timing, self.graphs
        )

    def generate(
        self, input_ids: Tensor, options: DecodingOptions, timing: bool = False
    ) -> Generation:
        """Decode to the end; arguments and errors as in ``stream``.

        Returns:
            Tokens, accept lengths, slot kinds, seconds of each phase and the stop reason.
        """
        *_, generation = self.stream(input_ids, options, timing)
        return generation

    def eagenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        max_length: int | None = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        min_p: float = 0.0,
        sampling: str = "topk",
        m: int | str | None = None,
        support: int | None = None,
        verification: str | None = None,
        normaliser: str | None = None,
        total_token: int | None = None,
        depth: int | None = None,
        tree_top_k: int | None = None,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ):
        """Decode speculatively. The positional arguments are those of EAGLE.

        Args:
            input_ids: int64 ``[1, L]`` or ``[L]`` prompt.
            temperature: of the target; below 1e-5 decoding is greedy.
            top_p: the target's nucleus filter; 0 is off.
            top_k: the target's top-k filter; 0 is off.
            max_new_tokens: exact cap on new tokens.
            max_length: cap on prompt and new tokens together; None is off.
            log: return the number of tokens and cycles, too.
            is_llama3: has no effect; the stop tokens always hold the template's end of turn.
            min_p: the target's min-p filter; 0 is off.
            sampling: "topk" for EAGLE's trees, "rheo" for RheoSampling, "none" for plain decoding.
            m: lead slots of a rheo pool, 0 to K-1, or "auto"; None is 1.
            support: draft tokens that carry q, 0 for all; None is 128. For "rheo".
            verification: "rheo" or "rrsw"; None is "rheo". For "rheo".
            normaliser: scores from the softmax over the "support" or the "full" draft vocabulary;
                None is "support". For "rheo".
            total_token: nodes of the draft tree, the root included; None takes the model's.
            depth: expansions of the tree after its first level; None takes the model's.
            tree_top_k: slots of a candidate pool; None takes the model's.
            seed: seed of the request's only generator.
            stop_token_ids: stop tokens besides the model's own.

        Returns:
            ids int64 ``[1, L + new]``; with ``log`` also the number of new tokens and the number
            of cycles - 1 (-1 without a cycle).

        Raises:
            ValueError: for an invalid value or a prompt that cannot be decoded.
            NonFiniteLogits: if the target's logits are NaN or infinite.
        """
        options = self.options(
            temperature,
            top_p,
            top_k,
            min_p,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            sampling=sampling,
            m=m,
            support=support,
            verification=verification,
            normaliser=normaliser,
            total_token=total_token,
            depth=depth,
            tree_top_k=tree_top_k,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )
        generation = self.generate(input_ids, options)
        if not log:
            return generation.output_ids
        return generation.output_ids, generation.new_tokens, generation.cycles - 1

    def ea_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        max_length: int | None = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        min_p: float = 0.0,
        sampling: str = "topk",
        m: int | str | None = None,
        support: int | None = None,
        verification: str | None = None,
        normaliser: str | None = None,
        total_token: int | None = None,
        depth: int | None = None,
        tree_top_k: int | None = None,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Iterator[Tensor]:
        """Stream: yields the ids so far after every cycle, and once if there is no cycle.

        Arguments and errors as in ``eagenerate``. As in EAGLE, ``log`` changes nothing here.

        Yields:
            ids int64 ``[1, L + new so far]``.
        """
        options = self.options(
            temperature,
            top_p,
            top_k,
            min_p,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            sampling=sampling,
            m=m,
            support=support,
            verification=verification,
            normaliser=normaliser,
            total_token=total_token,
            depth=depth,
            tree_top_k=tree_top_k,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )
        for generation in self.stream(input_ids, options):
            yield generation.output_ids

    def naivegenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        max_length: int | None = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        min_p: float = 0.0,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ):
        """Decode without drafting: the same cache, filters and stop tokens.

        Arguments, result and errors as in ``eagenerate``.
        """
        return self.eagenerate(
            input_ids,
            temperature,
            top_p,
            top_k,
            max_new_tokens,
            max_length,
            log,
            min_p=min_p,
            sampling="none",
            seed=seed,
            stop_token_ids=stop_token_ids,
        )

    def naive_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        max_length: int | None = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        min_p: float = 0.0,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Iterator[Tensor]:
        """Stream without drafting; arguments, items and errors as in ``ea_generate``."""
        return self.ea_generate(
            input_ids,
            temperature,
            top_p,
            top_k,
            max_new_tokens,
            max_length,
            log,
            min_p=min_p,
            sampling="none",
            seed=seed,
            stop_token_ids=stop_token_ids,
        )


def sample_prompt(target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Some question in the target's chat template, int64 ``[L]``; token 0 if it has none."""
    if tokenizer is None or not tokenizer.chat_template:
        return torch.zeros(1, dtype=torch.long, device=target.device)
    question = "Explain in a few sentences how a bicycle stays upright."
    text = chat_text(tokenizer, [{"role": "user", "content": question}])
    return torch.tensor(chat_ids(tokenizer, text), device=target.device)
