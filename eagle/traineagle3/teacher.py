"""What the head learns from: the target's features and final hidden states along the training texts."""

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
    """Makes training batches with the target, and may keep what the target said on disk.

    Args:
        corpus: the conversations, which batches name by their index.
        aux_layers: the target's feature layers.
        max_length: tokens of a text; the rest is cut off.
        folder: where to keep the states; None asks the target again every time.

    Raises:
        ValueError: where the target's output head is not all that stands between the decoder and the logits.
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
        self.store = None
        if folder is not None:
            self.store = Store(folder, self.texts, target, aux_layers)

    def batch(self, indices: list[int]) -> Batch:
        """The conversations ``indices`` as one padded batch."""
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
        """Features and final hidden state ``[B, n, aux_layers * h + h]``, from disk where they are there."""
        store = self.store
        if store is None or not all(store.has(i) for i in indices):
            states = torch.cat(self.target.teach(ids, self.aux_layers), -1)
            if store is None:
                return states
            for row, i in enumerate(indices):
                if not store.has(i):
                    store.write(i, states[row, : lengths[row]])
        # What was kept first stays, so that a text has the same states in whatever batch it comes again.
        states = torch.zeros(*ids.shape, store.width, dtype=store.data.dtype)
        for row, i in enumerate(indices):
            states[row, : lengths[row]] = store.read(i)
        return states


class Store:
    """States of all texts in one file, each at its place, and a mark for each that is there.

    The file is as long as it will get from the start (sparse where the file system can), so that a killed run loses nothing.

    Raises:
        ValueError: where the folder keeps the states of other texts or of another target.
        OSError: where the disk has no room for all of them.
    """

    def __init__(
        self, folder: Path, texts: list[Sequence[int]], target: TargetModel, aux_layers: list[int]
    ):
        lengths = torch.tensor([len(text) for text in texts])
        width, dtype = (len(aux_layers) + 1) * target.hidden_size, target.dtype
        self.width, self.ends = width, lengths.cumsum(0)
        content = {
            "texts": digest(texts),
            "target": fingerprint(target),
            "width": width,
            "dtype": str(dtype),
            "taps": aux_layers,
        }
        folder.mkdir(parents=True, exist_ok=True)
        about = folder / "about.json"
        if about.exists() and json.loads(about.read_text()) != content:
            raise ValueError(
                f"{folder} keeps the features of other texts or of another target; give another folder or delete it"
            )
        total = int(self.ends[-1])
        needed = total * width * dtype.itemsize
        if not about.exists() and shutil.disk_usage(folder).free < needed:
            raise OSError(
                f"{folder} has no room for the features of {total:,} tokens ({needed / 2**30:.1f} GiB)"
            )
        self.data = torch.from_file(
            str(folder / "states.bin"), shared=True, size=total * width, dtype=dtype
        ).view(total, width)
        self.present = torch.from_file(
            str(folder / "present.bin"), shared=True, size=len(texts), dtype=torch.bool
        )
        replace_text(about, json.dumps(content))

    def has(self, i: int) -> bool:
        return bool(self.present[i])

    def read(self, i: int) -> Tensor:
        """``[n, width]`` of text i."""
        return self.data[self._rows(i)]

    def write(self, i: int, states: Tensor) -> None:
        """Keep the states ``[n, width]`` of text i; the mark is set last."""
        self.data[self._rows(i)] = states.to("cpu")
        self.present[i] = True

    def _rows(self, i: int) -> slice:
        return slice(int(self.ends[i - 1]) if i else 0, int(self.ends[i]))


def fingerprint(target: TargetModel) -> str:
    """A hash of a few of the target's weights, to tell fine-tuned sisters apart."""
    found = hashlib.sha256()
    for weight in (target.output_head.weight[::97], *target.layers[-1].parameters()):
        found.update(weight.detach().flatten()[:4096].float().cpu().numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def check_output_head(target: TargetModel) -> None:
    """Raise a ValueError where the logits are not the output head's product with the decoder's final hidden state."""
    ids = torch.arange(3, device=target.device)[None] % target.vocab_size
    _, hidden = target.teach(ids, [0])
    logits = target.model(input_ids=ids, use_cache=False).logits.to(target.device)
    if not torch.allclose(target.output_head(hidden).float(), logits.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"unsupported for training: {type(target.model).__name__} changes its logits after its output head"
        )
