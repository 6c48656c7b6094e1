"""The options of one request."""

from dataclasses import dataclass, field

from eagle.model.sampling import WarperOptions
from rheo import PoolOptions, TreeOptions, check_verification

SAMPLINGS = ("topk", "rheo", "none")
RHEO_ONLY = ("m", "support", "verification", "normaliser")


@dataclass(frozen=True)
class DecodingOptions:
    """Everything that decides the output of one request, besides the models and the prompt.

    Attributes:
        warpers: temperature and filters of the target.
        sampling: "topk" or "rheo" draft trees, or "none" for plain decoding.
        m: lead slots of a rheo pool, a number or "auto"; None means 1.
        support: tokens that carry the draft distribution, 0 for all; None means 128.
        verification: "rheo" or "rrsw"; None means "rheo".
        normaliser: "support" or "full" (see ``rheo.PoolOptions``); None means "support".
        total_token: nodes of the draft tree, the root included.
        depth: expansions of the tree after its first level.
        tree_top_k: K, slots of a pool.
        max_new_tokens: exact cap on the number of new tokens.
        max_length: cap on prompt and new tokens together; None for no such cap.
        seed: seed of the request's only generator.
        stop_token_ids: stop tokens besides the model's own.

    Raises:
        ValueError: naming the value and the valid choices. m, support, verification and
            normaliser are for sampling "rheo" alone.
    """

    warpers: WarperOptions = field(default_factory=WarperOptions)
    sampling: str = "topk"
    m: int | str | None = None
    support: int | None = None
    verification: str | None = None
    normaliser: str | None = None
    total_token: int = 60
    depth: int = 7
    tree_top_k: int = 10
    max_new_tokens: int = 512
    max_length: int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.sampling not in SAMPLINGS:
            choices = ", ".join(SAMPLINGS)
            raise ValueError(f"sampling is {self.sampling!r}; choose one of {choices}")
        if self.sampling != "rheo":
            for name in RHEO_ONLY:
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"{name}={value!r} belongs to sampling 'rheo', not to {self.sampling!r}"
                    )
        check_verification(self.verification or "rheo", self.m)
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        _ = self.tree  # makes the options of the tree, and so checks them

    @property
    def tree(self) -> TreeOptions:
        """The draft tree's options."""
        pool = PoolOptions(size=self.tree_top_k, m=None)
        if self.sampling == "rheo":
            pool = PoolOptions(
                size=self.tree_top_k,
                m=1 if self.m is None else self.m,
                support=128 if self.support is None else self.support,
                temperature=self.warpers.temperature,
                normaliser=self.normaliser or "support",
            )
        return TreeOptions(pool, self.total_token, self.depth)
