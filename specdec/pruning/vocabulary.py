"""The most frequent tokens as a draft's output vocabulary (FR-Spec, Zhao et al., arXiv 2502.14856).

The unembedding of a large vocabulary can cost more than a small draft's layers. Decoding stays lossless when the draft proposes
from a part of the vocabulary: all other tokens have q = 0, and the verifier supplies them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.pruning.rebuild import named_tensors, plain, rebuild


def token_counts(tokens: Tensor, vocab_size: int, length: Tensor | None = None) -> Tensor:
    """``[V]`` counts of each token in ``tokens [B, L]`` (right-padded to L from ``length [B]``) or in ``[L]``.

    Raises:
        ValueError: tokens outside the vocabulary.
    """
    if length is not None:
        tokens = tokens[
            torch.arange(tokens.shape[-1], device=tokens.device) < length.to(tokens.device)[:, None]
        ]
    tokens = tokens.flatten()
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise ValueError(
            f"tokens go from {int(tokens.min())} to {int(tokens.max())} and vocab_size is {vocab_size}"
        )
    return torch.bincount(tokens, minlength=vocab_size)


def frequent_tokens(counts: Tensor, keep: int, always: Sequence[int] = ()) -> list[int]:
    """The ``keep`` tokens of the highest ``counts [V]``, ascending; ties go to the lower id.

    Args:
        always: ids that are kept in any case, such as those that end a text.
    Raises:
        ValueError: ``always`` has an id that does not exist; ``keep`` is below 1, above V, or below the number of ``always``.
    """
    V, forced = len(counts), sorted(set(always))
    unknown = [token for token in forced if not 0 <= token < V]
    if unknown:
        raise ValueError(f"always has {unknown[0]}: the counts are of ids from 0 to {V - 1}")
    if not max(1, len(forced)) <= keep <= V:
        raise ValueError(
            f"keep is {keep}: at least 1, at least the {len(forced)} of always, at most the {V} there are"
        )
    score = counts.double()
    score[forced] = float("inf")
    return sorted(score.argsort(descending=True, stable=True)[:keep].tolist())


@dataclass(frozen=True, eq=False)
class Trimmed:
    """A model with logits for some tokens only. It reads all tokens: its input embedding is complete.

    Attributes:
        model: its logits are ``[..., K]`` and its config's ``vocab_size`` is K. A config cannot express that the input has more
            tokens, so the trimmed model cannot be saved: save the full model, and trim again after loading.
        ids: ``[K]``, entry k is the token of logit k. vocab_size: V, of the input.
    """

    model: Any
    ids: Tensor
    vocab_size: int

    def full(self, logits: Tensor) -> Tensor:
        """``[..., V]`` from ``[..., K]``, with -inf for all other tokens."""
        out = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return out.index_copy_(-1, self.ids.to(logits.device), logits)


def keep_tokens(model: Any, ids: Sequence[int] | Tensor) -> Trimmed:
    """A model of the same class whose unembedding has only the rows of ``ids``; it shares no memory with ``model``.

    A tied unembedding is untied.

    Args:
        model: a transformers causal LM; it is only read. ids: distinct tokens, logit k is that of ``ids[k]``.
    Raises:
        TypeError: not a transformers model.
        ValueError: ids that do not exist or are repeated, or a model without an unembedding.
    """
    model = plain(model, "keep_tokens")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"keep_tokens: {type(model).__name__} has no linear unembedding; load it with AutoModelForCausalLM"
        )
    V = head.weight.shape[0]
    kept = torch.as_tensor(ids, dtype=torch.long).cpu()
    if (
        kept.dim() != 1
        or not len(kept)
        or len(kept.unique()) != len(kept)
        or int(kept.min()) < 0
        or int(kept.max()) >= V
    ):
        raise ValueError(f"ids: give distinct tokens from 0 to {V - 1}, at least one")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    name = next(name for name, module in model.named_modules() if module is head)
    tensors = {n: t for n, t in named_tensors(model).items() if not n.startswith(f"{name}.")}
    rows = {n: t.index_select(0, kept.to(t.device)) for n, t in head.named_parameters()}
    # Build with an unembedding of full size, which is never written to, then replace it by the small one.
    whole = {f"{name}.{n}": t for n, t in head.named_parameters()}
    new = rebuild(model, config, {**tensors, **whole}, "keep_tokens")
    small = torch.nn.utils.skip_init(  # draws no random numbers
        torch.nn.Linear,
        head.in_features,
        len(kept),
        bias="bias" in rows,
        device=new.get_input_embeddings().weight.device,
        dtype=head.weight.dtype,
    )
    for n, parameter in small.named_parameters():
        parameter.data = rows[n].detach().to(parameter.device)  # index_select has copied it
    new.set_output_embeddings(small.train(model.training))
    # Comparisons with the target and transformers' losses use the width of the logits.
    new.config.vocab_size = len(kept)
    if "vocab_size" in vars(new):
        new.vocab_size = len(kept)
    return Trimmed(new, kept, V)
