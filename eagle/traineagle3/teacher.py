"""What the draft head learns from: the target's states along the training texts."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle.files import replace_text
from eagle.model.target import TargetModel
from eagle.traineagle3.corpus import Conversation, digest
from eagle.traineagle3.objective import Batch


class Teacher:
    """Makes training batches by running the target, and can keep the target's states on disk.

    Args:
        target: the target.
        corpus: the conversations; a batch names them by their index.
        aux_layers: the target's auxiliary layers, whose inputs are the features.
        max_length: number of tokens of a conversation that are used; the rest is cut off.
        folder: where to keep the states. With None the target runs again for every batch.

    Attributes:
        texts: token ids of each conversation, cut off.
        first: index of the first answer token of each conversation.

    Raises:
        ValueError: if the target changes its logits after its output head, or if ``folder`` keeps
            the states of other texts or of another target.
        OSError: if ``folder`` has no room for the states.
    """

    def __init__(
        self,
        target: TargetModel,
        corpus: list[Conversation],
        aux_layers: list[int],
        max_length: int,
        folder: Path | None = None,
    ):
        check_output_head(target)
        self.target, self.aux_layers = target, aux_layers
        self.texts = [conversation.ids[:max_length] for conversation in corpus]
        self.first = [len(conversation.prompt) for conversation in corpus]
        self.store = None if folder is None else StateStore(folder, self.texts, target, aux_layers)

    def batch(self, indices: list[int]) -> Batch:
        """The conversations ``indices`` as one padded batch, on the target's device."""
        texts = [self.texts[i] for i in indices]
        lengths = [len(text) for text in texts]
        ids = torch.zeros(len(texts), max(lengths), dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        states = self.states(indices, ids, lengths)
        width = len(self.aux_layers) * self.target.hidden_size
        first = torch.tensor([self.first[i] for i in indices])
        batch = Batch(ids, states[..., :width], states[..., width:], first, torch.tensor(lengths))
        return batch.to(self.target.device)

    def states(self, indices: list[int], ids: Tensor, lengths: list[int]) -> Tensor:
        """Features, then the final hidden state: ``[B, n, (aux_layers + 1) * hidden]``.

        They come from disk if all of them are there, else from the target.

        Args:
            indices: indices of the B conversations.
            ids: int64 ``[B, n]`` their token ids, padded at the end.
            lengths: their numbers of tokens.
        """
        store = self.store
        if store is None or not all(store.has(i) for i in indices):
            states = torch.cat(self.target.teach(ids, self.aux_layers), -1)
            if store is None:
                return states
            for row, i in enumerate(indices):
                if not store.has(i):
                    store.write(i, states[row, : lengths[row]])
        # Padding can change the last bits. Always taking what was stored first gives a text the
        # same states in every batch.
        states = torch.zeros(*ids.shape, store.width, dtype=store.data.dtype)
        for row, i in enumerate(indices):
            states[row, : lengths[row]] = store.read(i)
        return states


class StateStore:
    """The states of all texts in one file, with a mark for each text whose states are there.

    The file has its final size from the start, so an interrupted run loses nothing. Parts not yet
    written take no room where the file system supports sparse files.

    Args:
        folder: where to keep the files.
        texts: token ids of each text.
        target: the target.
        aux_layers: its auxiliary layers.

    Attributes:
        width: number of values per token, ``(aux_layers + 1) * hidden``.
        data: ``[tokens, width]`` in the target's dtype, mapped from disk.

    Raises:
        ValueError: if the folder keeps the states of other texts or of another target.
        OSError: if the disk has no room for all of them.
    """

    def __init__(
        self, folder: Path, texts: list[Sequence[int]], target: TargetModel, aux_layers: list[int]
    ):
        self.width = width = (len(aux_layers) + 1) * target.hidden_size
        self.ends = torch.tensor([len(text) for text in texts]).cumsum(0)
        folder.mkdir(parents=True, exist_ok=True)
        about = folder / "about.json"
        content = {
            "texts": digest(texts),
            "target": fingerprint(target),
            "width": width,
            "dtype": str(target.dtype),
            "taps": aux_layers,
        }
        if about.exists() and json.loads(about.read_text()) != content:
            raise ValueError(
                f"{folder} keeps the features of other texts or of another target; choose another "
                "folder or delete it"
            )
        tokens = int(self.ends[-1])
        needed = tokens * width * target.dtype.itemsize
        if not about.exists() and shutil.disk_usage(folder).free < needed:
            raise OSError(
                f"{folder} has no room for the features of {tokens:,} tokens "
                f"({needed / 2**30:.1f} GiB)"
            )
        data = mapped_file(folder / "states.bin", tokens * width, target.dtype)
        self.data = data.view(tokens, width)
        self.present = mapped_file(folder / "present.bin", len(texts), torch.bool)
        replace_text(about, json.dumps(content))

    def has(self, i: int) -> bool:
        """Whether the states of text i are there."""
        return bool(self.present[i])

    def read(self, i: int) -> Tensor:
        """The states ``[n, width]`` of text i."""
        return self.data[self._rows(i)]

    def write(self, i: int, states: Tensor) -> None:
        """Keep the states ``[n, width]`` of text i."""
        self.data[self._rows(i)] = states.to("cpu")
        self.present[i] = True  # last, so that an interrupted write leaves no mark

    def _rows(self, i: int) -> slice:
        """The rows of text i."""
        return slice(int(self.ends[i - 1]) if i else 0, int(self.ends[i]))


def mapped_file(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor ``[size]`` whose values are the file's; writing to it changes the file."""
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def fingerprint(target: TargetModel) -> str:
    """A hash of some of the target's weights, to tell fine-tuned versions of a model apart."""
    hashed = hashlib.sha256()
    for weight in (target.output_head.weight[::97], *target.layers[-1].parameters()):
        hashed.update(weight.detach().flatten()[:4096].float().cpu().numpy().tobytes())
    return hashed.hexdigest()


@torch.no_grad()
def check_output_head(target: TargetModel) -> None:
    """Check that the logits are the output head applied to the decoder's final hidden state.

    Raises:
        ValueError: if they are not.
    """
    ids = torch.arange(3, device=target.device)[None] % target.vocab_size
    _, hidden = target.teach(ids, [0])
    logits = target.model(input_ids=ids, use_cache=False).logits.to(target.device)
    if not torch.allclose(target.output_head(hidden).float(), logits.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"unsupported for training: {type(target.model).__name__} changes its logits after "
            "its output head"
        )
