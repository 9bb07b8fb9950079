"""Texts sampled from a target after held-out contexts, and drafts' block efficiency on them: shared by evaluation and ablations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec as sd
from specdec.audit.tau import Efficiency, efficiency, parallel_chances, spire_chances
from specdec.data.prompts import entries
from specdec.drafts.spire import SpireModel
from specdec.training.forward import Parallel
from specdec.training.states import Batch


@dataclass
class Texts:
    """``tokens [C, L + 1 + n + k]``: contexts, the token of the prefill, n positions where rounds start, k more for the last round.

    ``prompt [C]`` tells which contexts come from one source file; intervals are made over files.
    """

    tokens: Tensor
    context: int
    new_tokens: int
    k: int
    domain: list[str]
    prompt: np.ndarray
    logits: Tensor
    hidden: dict[int, Tensor]


def contexts(
    tokenizer: Any, length: int, per_prompt: int, count: int | None
) -> list[tuple[str, int, list[int]]]:
    """(domain, number of the source file, ids) of pieces of the shipped held-out prompts, domains in turn."""
    pieces = []
    files: dict[tuple[str, str], int] = {}  # several prompts are cut from one file
    for entry in entries()[:count]:
        number = files.setdefault((entry["package"], entry["path"]), len(files))
        ids = tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - length + 1, length)
        pieces += [(entry["domain"], number, ids[a : a + length]) for a in starts[:per_prompt]]
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
    """Continuations drawn from the target at temperature 1, and what the target says along them.

    Args:
        target: a transformers causal LM. layers: whose inputs the drafts need.
    """
    pieces = contexts(tokenizer, length, per_prompt, count)
    decoder = sd.decoder(sd.HFModel(target, tokenizer)).build()
    rows: list[list[int]] = []
    for i in range(0, len(pieces), 24):
        ids = [piece[2] for piece in pieces[i : i + 24]]
        made = decoder.generate(
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
    domains, documents = [p[0] for p in pieces], np.array([p[1] for p in pieces])
    return Texts(tokens, length, new_tokens, k, domains, documents, torch.cat(logits), inputs)


@torch.no_grad()
def accept_chances(draft: Any, texts: Texts, forward: Parallel | None = None) -> Tensor:
    """``[C, n, k]``: the chance that each token of a block is accepted; a ``SpireModel`` by passes, a causal LM by its parallel forward.

    What a chain draft proposes after a block's start does not depend on how many tokens it will propose: a causal LM's law depends on
    the text alone, and a ``SpireModel``'s on the text, the block's start and the tokens since. So ``[..., :j]`` are the chances of blocks
    of j tokens.
    """
    made, L = [], texts.context
    device = next(draft.parameters()).device
    for i in range(0, len(texts.tokens), 8):
        tokens, logits = (t[i : i + 8].to(device) for t in (texts.tokens, texts.logits))
        if isinstance(draft, SpireModel):
            whole = torch.nn.functional.pad(
                logits, (0, 0, L, 0)
            )  # positions of the context are not looked at
            inputs = {layer: texts.hidden[layer][i : i + 8].to(device) for layer in draft.layers}
            chances = spire_chances(draft, whole, inputs, tokens, L + 1, texts.k)
        else:
            theirs = (forward or Parallel())(draft, Batch(tokens, {}, torch.empty(0)))
            chances = parallel_chances(logits, theirs[:, L:], tokens[:, L:], 1, texts.k)
        made.append(chances[:, : texts.new_tokens].cpu())
    return torch.cat(made)


def score(draft: Any, texts: Texts, forward: Parallel | None = None) -> Efficiency:
    """A draft's expected rounds and tokens on each text, for blocks of ``texts.k`` tokens."""
    return efficiency(accept_chances(draft, texts, forward))


def each_k(
    drafts: Mapping[str, tuple[Any, Parallel | None]], texts: Texts, lengths: Sequence[int]
) -> Iterator[tuple[Texts, dict[str, Efficiency]]]:
    """For each length of a block: the texts as texts of that k, and every draft's score, all from one pass at ``texts.k``.

    Args:
        drafts: method -> draft and forward, as for ``score``. lengths: at most ``texts.k``.
    """
    chances = {method: accept_chances(draft, texts, forward) for method, (draft, forward) in drafts.items()}
    for k in lengths:
        yield replace(texts, k=k), {method: efficiency(c, k) for method, c in chances.items()}


def part(made: Efficiency, which: np.ndarray) -> Efficiency:
    return Efficiency(*(t[torch.from_numpy(which)] for t in made))


def intervals(
    mine: Efficiency, other: Efficiency | None, documents: np.ndarray, draws: int = 2000, seed: int = 0
) -> dict[str, float | None]:
    """τ, and its ratio to ``other``'s on the same texts, with 95 % intervals by bootstrap over source files (paired)."""
    names, place = np.unique(documents, return_inverse=True)

    def sums(t: Tensor) -> np.ndarray:
        return np.bincount(place, t.numpy(), len(names))

    picks = np.random.default_rng(seed).integers(0, len(names), (draws, len(names)))

    def taus(e: Efficiency) -> np.ndarray:
        return sums(e.tokens)[picks].sum(1) / sums(e.rounds)[picks].sum(1)

    ours = taus(mine)
    low, high = np.quantile(ours, [0.025, 0.975])
    row: dict[str, float | None] = {"tau": mine.tau, "low": float(low), "high": float(high)}
    ratio: dict[str, float | None] = dict.fromkeys(("ratio_to_vanilla", "ratio_low", "ratio_high"))
    if other is not None:
        low, high = np.quantile(ours / taus(other), [0.025, 0.975])
        ratio = {"ratio_to_vanilla": mine.tau / other.tau, "ratio_low": float(low), "ratio_high": float(high)}
    return {**row, **ratio}


def rows_of(
    scores: dict[str, Efficiency], texts: Texts, domains: bool = True, reference: str = "vanilla"
) -> list[dict[str, Any]]:
    """One row a method and domain; acceptance by position, given that the position was reached."""
    out = []
    groups = ["all", *sorted(set(texts.domain))] if domains else ["all"]
    for domain in groups:
        which = np.flatnonzero([domain in ("all", d) for d in texts.domain])
        for method, made in scores.items():
            mine, base = part(made, which), scores.get(reference)
            other = None if base is None else part(base, which)
            figures = intervals(mine, other, texts.prompt[which])
            position = (mine.accepted.sum(0) / mine.reached.sum(0)).tolist()
            place = {"method": method, "context": texts.context, "k": texts.k, "domain": domain}
            out.append({**place, **figures, "acceptance": position, "texts": len(which)})
    return out
