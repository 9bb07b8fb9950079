"""Texts sampled from a target after held-out contexts, and drafts' block efficiency on them (``specdec.audit.tau``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.audit.tau import Efficiency, efficiency, magicdec_chances, parallel_chances, spire_chances
from specdec.builder import decoder
from specdec.data.prompts import entries
from specdec.drafts import MagicDec
from specdec.drafts.spire import SpireModel
from specdec.models.hf import HFModel
from specdec.training.forward import Parallel
from specdec.training.states import Batch


@dataclass(frozen=True)
class Texts:
    """``C`` contexts of L tokens and the target's continuations.

    Attributes:
        tokens: ``[C, L + 1 + n + k]``: contexts, the token of the prefill, n positions where rounds start, k more for the last round.
        context: L. new_tokens: n. k: of the longest block. prompt: ``[C]`` number of the source file of each context; intervals are
            over files. logits: ``[C, 1 + n + k - 1, V]`` after each token from the context's end on.
        hidden: layer -> its inputs ``[C, T, E]``.
    """

    tokens: Tensor
    context: int
    new_tokens: int
    k: int
    prompt: np.ndarray
    logits: Tensor
    hidden: dict[int, Tensor]


def contexts(tokenizer: Any, length: int, per_prompt: int, count: int | None) -> list[tuple[int, list[int]]]:
    """(number of the source file, ids) of pieces of the shipped held-out prompts, domains in turn."""
    pieces = []
    files: dict[tuple[str, str], int] = {}  # several prompts are cut from one file
    for entry in entries()[:count]:
        number = files.setdefault((entry["package"], entry["path"]), len(files))
        ids = tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - length + 1, length)
        pieces += [(number, ids[a : a + length]) for a in starts[:per_prompt]]
    if not pieces:
        raise SystemExit(
            f"no held-out prompt has {length} tokens: choose a smaller --contexts (about 1100 is the most)"
        )
    return pieces


@torch.no_grad()
def sample(
    target: Any,
    tokenizer: Any,
    length: int,
    new_tokens: int,
    k: int,
    layers: Sequence[int],
    seed: int,
    per_prompt: int,
    count: int | None,
) -> Texts:
    """Continuations sampled from the target at temperature 1, and the target's logits along them.

    Args:
        target: a transformers causal LM. length: tokens of a context. new_tokens, k: as for ``Texts``. layers: the layers whose
            inputs the drafts need. per_prompt: the most contexts cut from one prompt. count: prompts; ``None``: all.
    Raises:
        SystemExit: no prompt is long enough.
    """
    pieces = contexts(tokenizer, length, per_prompt, count)
    plain = decoder(HFModel(target, tokenizer)).build()
    rows: list[list[int]] = []
    for i in range(0, len(pieces), 24):
        ids = [piece for _, piece in pieces[i : i + 24]]
        made = plain.generate(
            ids, 1 + new_tokens + k, seed=[seed + i + j for j in range(len(ids))], eos_token_id=()
        )
        rows += [a + b for a, b in zip(ids, made.ids)]
    tokens = torch.tensor(rows)
    logits, hidden = [], []
    for part in tokens.split(8):
        out = target.base_model(part[:, :-1].to(target.device), use_cache=False, output_hidden_states=True)
        hidden.append({layer: out.hidden_states[layer].cpu() for layer in layers})
        logits.append(target.get_output_embeddings()(out.last_hidden_state[:, length:]).cpu())
    inputs = {layer: torch.cat([h[layer] for h in hidden]) for layer in layers}
    files = np.array([number for number, _ in pieces])
    return Texts(tokens, length, new_tokens, k, files, torch.cat(logits), inputs)


@torch.no_grad()
def accept_chances(draft: Any, texts: Texts, forward: Any = None) -> Tensor:
    """``[C, n, k]``: the probability that each token of a block is accepted: of a ``SpireModel`` by passes, of a causal LM by its
    parallel forward, of a ``MagicDec`` by its view of the target (an ``HFModel``), passed as ``forward``.

    A chain draft's distributions do not depend on how many tokens it will propose: a causal LM's depend on the text alone, and a
    ``SpireModel``'s on the text, the block's start and the tokens since. So ``[..., :j]`` holds for blocks of j tokens.
    """
    made, L = [], texts.context
    magicdec = isinstance(draft, MagicDec)
    device = torch.device("cpu") if magicdec else next(draft.parameters()).device
    for i in range(0, len(texts.tokens), 8):
        tokens, logits = (t[i : i + 8].to(device) for t in (texts.tokens, texts.logits))
        if magicdec:
            chances = magicdec_chances(draft, forward, logits, tokens, L + 1, texts.k)
        elif isinstance(draft, SpireModel):
            whole = torch.nn.functional.pad(logits, (0, 0, L, 0))  # positions of the context are not used
            inputs = {layer: texts.hidden[layer][i : i + 8].to(device) for layer in draft.layers}
            chances = spire_chances(draft, whole, inputs, tokens, L + 1, texts.k)
        else:
            theirs = (forward or Parallel())(draft, Batch(tokens, {}, torch.empty(0)))
            chances = parallel_chances(logits, theirs[:, L:], tokens[:, L:], 1, texts.k)
        made.append(chances[:, : texts.new_tokens].cpu())
    return torch.cat(made)


def score(draft: Any, texts: Texts, forward: Any = None) -> Efficiency:
    """A draft's expected rounds and tokens on each text, for blocks of ``texts.k`` tokens."""
    return efficiency(accept_chances(draft, texts, forward))


def each_k(
    drafts: Mapping[str, tuple[Any, Any]], texts: Texts, lengths: Sequence[int]
) -> Iterator[tuple[Texts, dict[str, Efficiency]]]:
    """For each block length k: the texts restricted to k, and every draft's score, all from one pass at ``texts.k``.

    Args:
        drafts: method -> draft and forward, as for ``score``. lengths: block lengths, at most ``texts.k``.
    """
    chances = {method: accept_chances(draft, texts, forward) for method, (draft, forward) in drafts.items()}
    for k in lengths:
        yield replace(texts, k=k), {method: efficiency(c, k) for method, c in chances.items()}
