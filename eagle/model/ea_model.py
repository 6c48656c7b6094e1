"""``EaModel``: a target and its EAGLE-3 head behind EAGLE's calls."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle.model.cuda_graph import Graphs
from eagle.model.decoding import Generation, decode
from eagle.model.demo import DEMO_NAME, demo_head_path, demo_target_path
from eagle.model.draft.checkpoint import load_draft
from eagle.model.draft.network import DraftModel
from eagle.model.linear import pack_linears
from eagle.model.loading import load_causal_lm, load_tokenizer
from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from eagle.model.target import TargetModel
from eagle.model.tokens import chat_ids, chat_text, stop_token_ids
from eagle.model.tuning.tree_size import choose_tree


class EaModel:
    """EAGLE-3 speculative decoding of one target with one head.

    Args:
        base_model: a causal language model of transformers.
        draft: its EAGLE-3 head; None allows plain decoding only.
        tokenizer: kept for callers and for the chat template's end-of-turn token.
        total_token, depth, top_k: size of the draft tree, as in EAGLE; -1 for ``total_token``, ``depth`` or both measures and chooses.
        cuda_graph: on one GPU, replay cycles as CUDA graphs.
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
        one_gpu = self.target.device.type == "cuda" and {
            p.device for p in base_model.parameters()
        } == {self.target.device}
        # Before 2.13 a generator does not recover from a capture that failed.
        self.graphs = Graphs() if cuda_graph and one_gpu and torch.__version__ >= (2, 13) else None
        self.stop_ids = stop_token_ids(base_model, tokenizer)
        if -1 in (total_token, depth):
            if draft is None:
                raise ValueError(
                    f"total_token={total_token}, depth={depth}: -1 chooses the tree for a head, and none is loaded; give ea_model_path to from_pretrained"
                )
            given = (None if size == -1 else size for size in (total_token, depth))
            total_token, depth = choose_tree(
                self.target, draft, sample_prompt(self.target, tokenizer), *given, top_k
            )
        self.tree_defaults = {"total_token": total_token, "depth": depth, "top_k": top_k}
        DecodingOptions(**self.tree_defaults)  # checks the sizes

    @classmethod
    def from_pretrained(
        cls,
        base_model_path: str | None = None,
        ea_model_path: str | None = None,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        dtype: str | torch.dtype = "auto",
        device_map="auto",
        torch_dtype: str | torch.dtype | None = None,
        use_eagle3: bool = True,
        threshold: float = 1.0,
        cuda_graph: bool = True,
        pack_weights: bool = True,
        **kwargs,
    ) -> "EaModel":
        """Load a target and its head.

        Args:
            base_model_path: Hub id, folder or ``.gguf`` file; "smollm2-demo" is the demo pair.
            ea_model_path: Hub id or folder of the EAGLE-3 head; None loads the target alone (or the demo's head).
            dtype: "auto" (as stored), "bf16", "fp16", "fp32", "fast" (bf16 where the hardware multiplies in it, else fp32) or a torch
                dtype, for both networks; ``torch_dtype`` is EAGLE's name for it.
            device_map: as in transformers.
            cuda_graph: as in the class.
            pack_weights: on a CPU, lay the weights of linear layers out for its products (see ``eagle.model.linear``). Such networks can be
                neither moved nor trained; False leaves them as they were loaded.
            threshold: EAGLE's keyword; only its default, 1.0, has a meaning here.
            kwargs: go to the target's ``from_pretrained``.

        Raises:
            ValueError: for EAGLE-1/2 heads, a head that does not fit, or an unsupported target.
        """
        if not use_eagle3:
            raise ValueError(
                "use_eagle3=False asks for an EAGLE-1/2 head; only EAGLE-3 heads are supported"
            )
        if threshold != 1.0:
            raise ValueError(f"threshold is {threshold}; only 1.0 is supported")
        if base_model_path is None:
            raise ValueError(
                f"base_model_path is missing; give a Hub id, a folder, a .gguf file or {DEMO_NAME!r}"
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
        """The model is always in evaluation mode; EAGLE's callers ask for it."""
        return self

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's tokenizer (EAGLE's name for it)."""
        return self.tokenizer

    def options(
        self,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        min_p: float = 0.0,
        tree_top_k: int | None = None,
        **kwargs,
    ) -> DecodingOptions:
        """The decoding options of a call: filters by their plain names, ``tree_top_k`` for the slots of a pool.

        Raises:
            ValueError: naming an argument that does not exist, or an invalid value.
        """
        defaults = self.tree_defaults | ({} if tree_top_k is None else {"top_k": tree_top_k})
        known = set(DecodingOptions.__dataclass_fields__) - {"warpers", "top_k"}
        unknown = sorted(kwargs.keys() - known)
        if unknown:
            raise ValueError(
                f"unsupported: {', '.join(unknown)}; decoding knows temperature, top_p, top_k, min_p, {', '.join(sorted(known))}"
            )
        return DecodingOptions(
            warpers=WarperOptions(temperature, top_k, top_p, min_p), **(defaults | kwargs)
        )

    def stream(
        self, input_ids: Tensor, options: DecodingOptions, timing: bool = False
    ) -> Iterator[Generation]:
        """The growing ``Generation`` after every cycle (the same object each time).

        Raises:
            ValueError: where drafting is asked for and no head is loaded; from the first item on, for a prompt that
                cannot be decoded.
            NonFiniteLogits: from the item on whose target logits are NaN or infinite.
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
        """The rich result of a whole request: tokens, accept lengths, slot kinds, seconds per phase, stop reason."""
        for generation in self.stream(input_ids, options, timing):
            pass
        return generation

    def eagenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        **kwargs,
    ):
        """Speculative decoding; arguments as in EAGLE, further ones as in ``options``.

        ``is_llama3`` is accepted and not needed: the stop set always holds the template's end-of-turn token.

        Returns:
            ids ``[1, L]``; with ``log=True`` also the number of new tokens and cycles - 1 (-1 without a cycle).
        """
        options = self.options(
            temperature,
            top_p,
            top_k,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            **kwargs,
        )
        generation = self.generate(input_ids, options)
        if not log:
            return generation.output_ids
        return generation.output_ids, generation.new_tokens, generation.cycles - 1

    def naivegenerate(self, input_ids: Tensor, *args, **kwargs):
        """Plain decoding with the same cache, warpers and stop set; arguments and result as in ``eagenerate``."""
        return self.eagenerate(input_ids, *args, sampling="none", **kwargs)

    def ea_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        **kwargs,
    ) -> Iterator[Tensor]:
        """Streaming: ids ``[1, L]`` so far, once a cycle (and once where no cycle runs).

        ``log`` stands where EAGLE has it and, as there, changes nothing: each item is the ids alone.
        """
        options = self.options(
            temperature,
            top_p,
            top_k,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            **kwargs,
        )
        for generation in self.stream(input_ids, options):
            yield generation.output_ids

    def naive_generate(self, input_ids: Tensor, *args, **kwargs) -> Iterator[Tensor]:
        """Streaming plain decoding; arguments as in ``ea_generate``."""
        return self.ea_generate(input_ids, *args, sampling="none", **kwargs)


def sample_prompt(target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """int64 ``[L]``: any question in the target's chat template; without one, token 0."""
    if tokenizer is None or not tokenizer.chat_template:
        return torch.zeros(1, dtype=torch.long, device=target.device)
    text = chat_text(
        tokenizer,
        [{"role": "user", "content": "Explain in a few sentences how a bicycle stays upright."}],
    )
    return torch.tensor(chat_ids(tokenizer, text), device=target.device)


__all__ = ["DecodingOptions", "EaModel", "Generation", "WarperOptions"]
