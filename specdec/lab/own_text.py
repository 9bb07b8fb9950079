"""Text of one's own for a training: read from a data set, cut into sequences, and split into those to train on and those held out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.lab.documents import answered, documents, packed
from specdec.lab.fitting import Trains, say
from specdec.lab.options import option
from specdec.pruning import frequent_tokens, token_counts
from specdec.training.sources import Masked

Part = Tensor | Masked
"""Sequences ``[N, length + 1]``; ``Masked`` where the head does not learn all of their tokens."""


@dataclass(frozen=True)
class OnOwnText(Trains):
    """The base of the settings of recipes that train on text of the user's own."""

    dataset: str = option("", "a file, a folder, or a data set of the hub")
    column: str = option("text", "the data set's column of texts, or of lists of chat messages")
    length: int = option(1024, "tokens of a sequence")
    all_tokens: bool = option(False, "learn all tokens of chats, not the assistant's alone")
    validation: int = option(16, "number of held-out sequences")
    validation_dataset: str = option(
        "", "text of their own for them, as --dataset (default: its first sequences)"
    )

    def cut(self, tokenizer: Any, dataset: str, count: int) -> Part:
        """At most ``count`` sequences of a data set.

        Raises:
            SystemExit: the data set cannot be read, or its chats have no sequence of which the assistant wrote some.
        """
        none = torch.zeros(0, self.length + 1, dtype=torch.long)
        rows = documents(dataset, self.column)
        if self.all_tokens:
            return torch.cat([none, *packed(tokenizer, rows, self.length, count)])
        seen: Counter[str] = Counter()
        found = [*answered(tokenizer, rows, self.length, count, seen)]
        if seen["whole"]:
            say(
                f"of {seen['whole']} of {seen['chats']} chats all tokens are learnt, as the tokenizer's chat template does not show what the assistant wrote"
            )
        if not found and seen["chats"]:
            raise SystemExit(
                f"--dataset {dataset}: its {seen['chats']} chats have no sequence of {self.length} tokens of which the assistant wrote some: give more chats, a "
                "smaller --length, or --all-tokens"
            )
        if not found:
            return none
        ids, learnt = (torch.cat(part) for part in zip(*found))
        return Masked(ids, learnt) if seen["chats"] > seen["whole"] else ids

    def held_out(self, tokenizer: Any) -> Part:
        """The sequences of ``validation_dataset``.

        Raises:
            SystemExit: as ``cut``, or the text is too short for a sequence.
        """
        name = "--validation-dataset"
        try:
            held = self.cut(tokenizer, self.validation_dataset, self.validation)
        except SystemExit as error:  # which names the other option
            raise SystemExit(str(error).replace("--dataset", name)) from None
        if not len(held):
            raise SystemExit(
                f"{name} {self.validation_dataset}: its text has no sequence of {self.length} tokens: give more text, or a smaller --length"
            )
        if len(held) < self.validation:
            say(f"{name} has {len(held)} sequences, fewer than --validation {self.validation}")
        return held

    def texts(self, tokenizer: Any) -> tuple[Part, Part]:
        """The sequences for training, and those that are held out: of ``validation_dataset``, or else the first ``validation`` of ``dataset``.

        Raises:
            SystemExit: as ``cut``, or a text is too short for a sequence.
        """
        wanted, least = max(1, round(self.tokens * 1e6 / self.length)), self.validation
        if self.validation_dataset:
            held, least = self.held_out(tokenizer), 0
        ids, learnt = split(self.cut(tokenizer, self.dataset, wanted + least))
        if len(ids) <= least:
            out, more = (
                (f", and --validation {least} of them are held out", " or --validation")
                if least
                else ("", "")
            )
            raise SystemExit(
                f"--dataset {self.dataset}: its text has {len(ids)} sequences of {self.length} tokens{out}: give more text, or a smaller --length{more}"
            )
        if len(ids) - least < wanted:
            has = (len(ids) - least) * self.length / 1e6
            say(f"the text has {has:.3g} M training tokens, fewer than --tokens {self.tokens:g}")

        def some(which: slice) -> Part:
            return ids[which] if learnt is None else Masked(ids[which], learnt[which])

        return some(slice(least, None)), held if self.validation_dataset else some(slice(least))


def split(part: Part) -> tuple[Tensor, Tensor | None]:
    """The ids ``[N, length + 1]``, and which of them are learnt, bool of the same shape; ``None``: all."""
    return (part.data, part.mask) if isinstance(part, Masked) else (part, None)


def frequent(part: Part, tokenizer: Any, size: int, vocabulary: int) -> list[int]:
    """The ``vocabulary`` most frequent of the tokens that are learnt, with the one that ends texts.

    Args:
        size: of the target's vocabulary.
    """
    ids, learnt = split(part)
    ids = ids[:, 1:]  # the first of a sequence is the last of another
    counts = token_counts((ids if learnt is None else ids[learnt[:, 1:]]).flatten(), size)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    chosen = frequent_tokens(counts, vocabulary, end)
    share = float(counts[chosen].sum() / counts.sum())
    say(f"--vocabulary {vocabulary}: these tokens are {share:.1%} of the training text")
    return chosen
