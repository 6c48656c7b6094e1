"""The EAGLE-3 draft head: its network, its state in one request, its checkpoint."""

from eagle.model.draft.checkpoint import load_draft
from eagle.model.draft.network import DraftModel
from eagle.model.draft.state import DraftState

__all__ = ["DraftModel", "DraftState", "load_draft"]
