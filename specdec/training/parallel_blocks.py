"""The training forward of parallel drafting: blocks of mask tokens after many positions of a text at once (PARD, arXiv 2504.18583, section 3.2).

A position after which a block begins is its anchor. The paper's training drops mask tokens at random, more of them at greater depths. Here whole blocks begin at random
anchors, as DFlash's do, so that each depth is trained equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from specdec.arguments import whole
from specdec.configs import parallel_token
from specdec.masks import Causal
from specdec.models.fingerprint import unwrapped
from specdec.training.forward import Blocks, Drafted, band_attention
from specdec.training.states import Batch

MULTIPLE = 64  # of the ids of a vocabulary that grows


@dataclass(frozen=True)
class ParallelBlocks(Blocks):
    """The forward of a transformers causal LM that ``drafts.Parallel`` will draft with: the text, and after each anchor ``k - 1`` mask tokens.

    Args:
        k, anchors: as for ``Blocks``. mask_token: as for ``drafts.Parallel``.
    Raises:
        ValueError: a number below 1; in a call: no mask token, or a text that is too short for one block.
    """

    k: int = 8
    mask_token: int | None = None

    def layers(self, draft: Any) -> tuple[int, ...]:
        return ()

    def __call__(
        self, draft: Any, batch: Batch, draws: Sequence[np.random.Generator] | None = None
    ) -> Drafted:
        """Blocks of a batch, over the draft's vocabulary; ``draws``: a generator for each of its texts."""
        mask = self.mask_of(draft)
        anchors, text = self.places(batch, draws), batch.tokens[:, :-1]
        B, L = text.shape
        A, more = anchors.shape[1], self.k - 1
        slots = anchors[..., None] + torch.arange(1, self.k, device=text.device)  # [B, A, k - 1] positions
        tokens = torch.cat([text, text.new_full((B, A * more), mask)], 1)
        positions = torch.cat([torch.arange(L, device=text.device).expand(B, -1), slots.flatten(1)], 1)
        before = draft.config._attn_implementation
        draft.set_attn_implementation("specdec_blocks")
        try:  # the draft's attention setting is restored below
            made = draft.base_model(
                input_ids=tokens, position_ids=positions, use_cache=False, anchors=anchors, slots=slots
            )
        finally:
            draft.set_attn_implementation(before)
        x = made.last_hidden_state
        row = torch.arange(B, device=x.device)[:, None]
        blocks = torch.cat([x[row, anchors][:, :, None], x[:, L:].unflatten(1, (A, more))], 2)
        head = draft.get_output_embeddings()
        logits = F.linear(blocks, head.weight, head.bias)
        return Drafted(logits, anchors[..., None] + torch.arange(self.k, device=x.device))

    def mask_of(self, draft: Any) -> int:
        """The mask token of a draft.

        Raises:
            TypeError: it is no whole number. ValueError: there is none, or it is no id of the draft.
        """
        mask = parallel_token(draft.config) if self.mask_token is None else self.mask_token
        if mask is None:
            raise ValueError(
                "mask_token is not given, and the draft's config has no pard_token: training.parallel_blocks.with_mask_token(draft) gives it one"
            )
        check_id(mask, len(draft.get_input_embeddings().weight))
        return mask

    @torch.no_grad()
    def check(self, draft: Any) -> None:
        """Raise ValueError for a draft whose own forward computes something else than this one, such as a scale or a soft cap, or attention in another way."""
        ids = torch.arange(9, device=draft.device)[None] % len(draft.get_input_embeddings().weight)
        mask, training = self.mask_of(draft), draft.training
        draft.eval()
        try:
            one = replace(self, k=3, anchors=None)
            ours = one(draft, Batch(ids, {}, ids.new_zeros(1, 8, 1))).logits[0, 1]  # after 5 tokens
            own = draft(torch.cat([ids[:, :5], ids.new_full((1, 2), mask)], 1)).logits[0, -3:]
        except TypeError as error:
            raise ValueError(
                f"draft: a {type(draft).__name__} does not take what this forward gives to its attention ({error}): use a llama-like model"
            ) from error
        finally:
            draft.train(training)
        if not torch.allclose(ours.float(), own.float(), rtol=1e-2, atol=1e-2 * float(own.abs().max())):
            raise ValueError(
                f"draft: a {type(draft).__name__} computes more than this forward (a scale, a soft cap, or attention of its own): use a llama-like model"
            )


def block_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    anchors: Tensor | None = None,
    slots: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a text and of blocks after its ``anchors [B, A]``, at positions ``slots [B, A, m]``: a slot sees the text up to its anchor, and its block
    up to itself. ``query [B, Hq, L + A * m, D]``."""
    if anchors is None or slots is None:
        raise TypeError("its layers do not pass arguments on to the attention function")
    A, m = slots.shape[1:]
    L = query.shape[2] - A * m
    q, k, v = (t[:, :, :L] for t in (query, key, value))
    of_text, _ = band_attention(
        module, q, k, v, None, scaling, sliding_window=sliding_window, shown=Causal(), **others
    )
    if not m:
        return of_text, None
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    q = query[:, :, L:].unflatten(2, (A, m)) * (scaling or query.shape[-1] ** -0.5)
    own_key, own_value = (t[:, :, L:].unflatten(2, (A, m)) for t in (key, value))
    at = torch.arange(L, device=query.device)
    far, near = (
        at <= anchors[..., None, None],
        slots[..., None, :] <= slots[..., None],
    )  # [B, A, 1, L], [B, A, m, m]
    if sliding_window is not None:
        far = far & (at > slots[..., None] - sliding_window)
        near = near & (slots[..., None, :] > slots[..., None] - sliding_window)
    seen = torch.cat([far.expand(-1, -1, m, -1), near], -1)[:, None]
    past = (q.flatten(2, 3) @ key[:, :, :L].transpose(2, 3)).unflatten(2, (A, m))
    scores = torch.cat([past, q @ own_key.transpose(3, 4)], -1)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    of_past, of_own = weights.split([L, m], -1)
    out = (of_past.flatten(2, 3) @ value[:, :, :L]).unflatten(2, (A, m)) + of_own @ own_value
    return torch.cat([of_text, out.flatten(2, 3).transpose(1, 2)], 1), None


AttentionInterface.register("specdec_blocks", block_attention)


@torch.no_grad()
def with_mask_token(draft: Any, mask_token: int | None = None) -> Any:
    """Write ``pard_token``, the mask token for ``drafts.Parallel``, into the config of ``draft``, and return ``draft``, which is changed. One that has a mask token
    keeps it, unless another is given.

    Args:
        draft: a transformers causal LM, or an ``HFModel`` of it.
        mask_token: an id that no text has, such as one between the tokenizer's last id and the end of a padded vocabulary; ``None``: the first id of those by
            which the vocabulary then grows, to a multiple of 64 (kernels need multiples). New embeddings are the mean of all.
    Raises:
        TypeError: it is no whole number. ValueError: no id of the draft.
    """
    draft = unwrapped(draft)
    if mask_token is None and parallel_token(draft.config) is not None:
        return draft
    if mask_token is None:
        table = draft.get_input_embeddings().weight
        mask_token, mean = len(table), table.mean(0)
        draft.resize_token_embeddings(mask_token + 1, pad_to_multiple_of=MULTIPLE, mean_resizing=False)
        draft.get_input_embeddings().weight[mask_token:] = mean
    check_id(mask_token, len(draft.get_input_embeddings().weight))
    draft.config.pard_token = int(mask_token)
    return draft


def check_id(mask_token: Any, size: int) -> None:
    """Raise TypeError or ValueError unless ``mask_token`` is one of ``size`` ids."""
    whole("mask_token", mask_token)
    if not 0 <= mask_token < size:
        raise ValueError(f"mask_token is {mask_token}: the draft has ids from 0 to {size - 1}")
