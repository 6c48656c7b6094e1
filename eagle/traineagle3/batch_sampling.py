"""Plain sampling from the target, many texts at a time.

1. Pad the prompts on the left to one length.
2. Generate a stretch of a few tokens for all of them.
3. Drop the texts that have ended, from the batch and from the cache.
4. Repeat 2 and 3 until every text has ended or has reached the cap.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StaticCache

from eagle.model.cycle import NonFiniteLogits
from eagle.model.ea_model import EaModel

STRETCH = 16  # tokens between two checks for texts that have ended


class BatchSampler:
    """Samples continuations of several prompts at once.

    Args:
        model: used for nothing else, because its own generation config is replaced. transformers
            takes settings from there that a call leaves open, such as a repetition penalty or
            filters. The texts must have the target's own distribution, as in decoding.
    """

    def __init__(self, model: EaModel):
        self.base_model, self.target = model.base_model, model.target
        self.base_model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def sample(
        self, prompts: list[list[int]], temperature: float, cap: int, stop_ids: frozenset[int]
    ) -> list[tuple[list[int], bool]]:
        """Sample one continuation of each prompt, from torch's global random number generator.

        Args:
            prompts: token ids.
            temperature: above 0.
            cap: most new tokens of a text.
            stop_ids: tokens that end a text.

        Returns:
            For each prompt the new tokens, up to the first stop token (included), and whether
            there was a stop token.

        Raises:
            NonFiniteLogits: if the target's probabilities are NaN.
        """
        stops, device = sorted(stop_ids), self.target.device
        filler = stops[0] if stops else 0
        length = max(map(len, prompts))
        padding = [length - len(prompt) for prompt in prompts]
        ids = torch.tensor([[filler] * n + p for n, p in zip(padding, prompts)], device=device)
        mask = torch.tensor([[0] * n + [1] * (length - n) for n in padding], device=device)
        # The cache has a fixed size, because one that grows is copied as a whole at every token.
        cache = StaticCache(config=self.target.config, max_cache_len=length + cap)
        sampler = LogitsProcessorList([TokenSampler(temperature)])

        texts: list[tuple[list[int], bool]] = [([], False)] * len(prompts)
        active = list(range(len(prompts)))  # prompt of each row
        for written in range(0, cap, STRETCH):
            config = GenerationConfig(
                max_new_tokens=min(STRETCH, cap - written),
                eos_token_id=stops or None,
                pad_token_id=filler,
                disable_compile=True,
            )
            ids = self.base_model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=sampler,
                **{self.target.cache_keyword: cache},
            )
            mask = pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            for prompt, new in zip(active, ids[:, length:].tolist()):
                texts[prompt] = cut(new, stop_ids)
            rows = [row for row, prompt in enumerate(active) if not texts[prompt][1]]
            if not rows:
                break
            if len(rows) < len(active):
                active, ids, mask = [active[row] for row in rows], ids[rows], mask[rows]
                keep_rows(cache, rows)
        return texts


def cut(ids: list[int], stop_ids: frozenset[int]) -> tuple[list[int], bool]:
    """Token ids up to the first stop token (included), and whether there is a stop token."""
    for i, token in enumerate(ids):
        if token in stop_ids:
            return ids[: i + 1], True
    return ids, False


def keep_rows(cache: StaticCache, rows: list[int]) -> None:
    """Keep only some sequences of a batch in its cache."""
    for layer in cache.layers:
        layer.keys, layer.values, layer.batch_size = layer.keys[rows], layer.values[rows], len(rows)


class TokenSampler(LogitsProcessor):
    """Samples one token of each row and removes all others, so that greedy ``generate`` takes it.

    The sampling of ``generate`` itself needs one random number for each token of the vocabulary.
    On a CPU, in a large batch, this costs more time than the network. This class needs two random
    numbers for each row: one chooses a block of the vocabulary, one a token of the block.

    Args:
        temperature: above 0.

    Raises:
        NonFiniteLogits: when called, if a probability is NaN.
    """

    BLOCK = 256

    def __init__(self, temperature: float):
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits ``[B, vocab]``: 0 for the sampled token of each row, -inf for the others."""
        probs = (scores.float() / self.temperature).softmax(-1)
        if probs.isnan().any():
            raise NonFiniteLogits(scores.dtype)
        blocks = pad(probs, (0, -probs.shape[-1] % self.BLOCK)).unflatten(-1, (-1, self.BLOCK))
        block = sample_index(blocks.sum(-1))
        rows = torch.arange(len(probs), device=probs.device)
        token = block * self.BLOCK + sample_index(blocks[rows, block])
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0)


def sample_index(weights: Tensor) -> Tensor:
    """Sample one index of each row, int64 ``[B]``, in proportion to the weights ``[B, n]``.

    It takes one number a row from torch's global random number generator.
    """
    sums = weights.double().cumsum(-1)
    mark = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, mark, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)
