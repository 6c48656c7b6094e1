"""The options of one request."""

from dataclasses import dataclass, field

from eagle.model.sampling import WarperOptions
from rheo import PoolOptions, TreeOptions, check_verification

SAMPLINGS = ("topk", "rheo", "none")


@dataclass(frozen=True)
class DecodingOptions:
    """Everything that decides the output of one request, except the models and the prompt.

    Attributes:
        probs: temperature and filters of the target.
        sampling: "topk" or "rheo" draft trees, "none" for plain decoding.
        m, support, verification, normaliser: of the rheo pool (``rheo.PoolOptions``); None takes 1, 128, "rheo",
            "support". They belong to "rheo" alone.
        total_token, depth, top_k: tree nodes with the root, expansions after the first level, slots of a pool.
        max_new_tokens: exact cap on new tokens.
        max_length: cap on prompt and new tokens together; None for no cap.
        seed: of the request's one generator.
        stop_token_ids: stop tokens besides the model's own.

    Raises:
        ValueError: quoting the value and the valid choices.
    """

    warpers: WarperOptions = field(default_factory=WarperOptions)
    sampling: str = "topk"
    m: int | str | None = None
    support: int | None = None
    verification: str | None = None
    normaliser: str | None = None
    total_token: int = 60
    depth: int = 7
    top_k: int = 10
    max_new_tokens: int = 512
    max_length: int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"sampling is {self.sampling!r}; choose one of {', '.join(SAMPLINGS)}")
        if self.sampling != "rheo":
            for name in ("m", "support", "verification", "normaliser"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} belongs to sampling 'rheo', not to {self.sampling!r}"
                    )
        check_verification(self.verification or "rheo", self.m)
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        _ = self.tree  # builds, and so checks, the tree's options

    @property
    def tree(self) -> TreeOptions:
        """The draft tree's options."""
        if self.sampling == "rheo":
            pool = PoolOptions(
                size=self.top_k,
                m=1 if self.m is None else self.m,
                support=128 if self.support is None else self.support,
                temperature=self.warpers.temperature,
                normaliser=self.normaliser or "support",
            )
        else:
            pool = PoolOptions(size=self.top_k, m=None)
        return TreeOptions(pool, self.total_token, self.depth)
