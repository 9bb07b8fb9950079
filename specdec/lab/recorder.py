"""A verifier that follows recorded texts and notes what a draft proposes along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec import tree
from specdec.audit.siblings import distinct_chances, sibling_chances
from specdec.audit.tau import chances
from specdec.audit.truncated import Known, distinct_bounds, sibling_bounds
from specdec.capabilities import Siblings, VerifierInfo
from specdec.lab.recorded import Recorded
from specdec.lab.traces import Law, Trace
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict


@dataclass(eq=False)
class Recorder:
    """A verifier that accepts nothing, commits the text's next token, and notes what the draft would have done along the text.

    Args:
        trace: of the texts. which: ``[C]`` numbers of texts, one a row. ids: ``[C, T]`` their tokens, padded. prompt: ``[C]`` tokens of the prompts.
            k: the longest path. stand_in: the target, if it is not computed. strays: accept up to two nodes of the text, so that blocks start at other
            positions, for the check that a draft depends on the text alone. siblings: how the children of a node are drawn.
        watch: called for every round of chains with the numbers ``[R]`` of the texts, the starts ``[R]`` of their blocks, the distributions ``[R, N, V]`` from which
            the tokens were drawn, and whether each of them comes after tokens of the text ``[R, N]``.
    Attributes:
        q: ``[C, n, k]`` float64: the probability with which the draft drew the text's token at each depth of a block that starts at each position,
            given that it had drawn those before; 1 for a token chosen without randomness, 0 for one that was not proposed.
        accept: ``[C, n, k]`` the probability, given the text, that the token came from the draft if those before it did.
        high: ``[C, n, k]`` the same as ``accept``, unless the trace has only the largest probabilities, which bound the chances of siblings.
        most, entropy: ``[C, n, k]`` the largest probability of the distribution there, and its entropy in nats.
        size: ``[C, n]`` the depth down to which the draft proposed along the text. proposed: ``[C, n]`` all nodes that it proposed, those after a token
            that is not the text's included: what was drafted and verified. seen: ``[C, n]`` whether a block started there. chains: whether all
            proposals were chains.
    """

    trace: Trace
    which: list[int]
    ids: Tensor
    prompt: Tensor
    k: int
    stand_in: Recorded | None = None
    strays: bool = False
    siblings: Siblings = "independent"
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None
    info: VerifierInfo = VerifierInfo("recorder", lossless=True)

    def __post_init__(self) -> None:
        texts = [self.trace.texts[i] for i in self.which]
        self.rounds = torch.tensor([t.rounds for t in texts])
        C, n = len(texts), int(self.rounds.max())
        self.q, self.accept, self.high, self.most, self.entropy = torch.zeros(
            5, C, n, self.k, dtype=torch.float64
        )
        self.size, self.proposed = torch.zeros(2, C, n, dtype=torch.long)
        self.chains = True
        self.seen = torch.zeros(C, n, dtype=torch.bool)
        # Positions with a token of the text.
        self.last = torch.tensor([len(t.ids) - t.prompt - 1 for t in texts])
        own = [self.trace.own(i).double() for i in self.which]
        self._law = cache(self.trace.law)
        self.own = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=1.0)
        self.own = torch.nn.functional.pad(self.own, (0, self.k), value=1.0)

    def check(self, proposal: Proposal) -> None:
        """Refuse proposals that ``Rejection`` refuses."""
        if proposal.provenance == "declared":
            raise ValueError(
                "the draft declares probabilities that the library did not draw from, so its acceptance is not known: draw with "
                "rng.categorical and provenance='sampled'"
            )

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        row = context.request
        start = context.length - self.prompt[row] - 1  # -1: the prefill
        path = torch.full(proposal.tokens.shape, -1)
        here = ((start >= 0) & (start < self.rounds[row])).nonzero()[:, 0]
        self.seen[row[here], start[here]] = True
        if proposal.nodes:
            self.proposed[row[here], start[here]] = proposal.size[here]
            if bool(tree.is_chain(proposal.parents, proposal.size).all()):
                on_text = self._chain(proposal, context, row, start, here)
                path = torch.where(on_text, torch.arange(proposal.nodes), -1)
            else:
                self.chains = False
                for b in here.tolist():
                    nodes = self._tree(proposal, b, int(row[b]), int(start[b]), int(context.length[b]))
                    path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
        accepted = torch.zeros_like(context.length)
        if self.strays:
            accepted = torch.where(start >= 0, (path >= 0).sum(1).minimum(context.length % 3), 0)
        path = torch.where(torch.arange(path.shape[1]) < accepted[:, None], path, -1)
        bonus = self.ids[row, (context.length + accepted).clamp(max=self.ids.shape[1] - 1)]
        verdict = Verdict.of(proposal, path, accepted, bonus)
        if self.stand_in is not None:
            self.stand_in.forget(probs)
        return verdict

    def _chain(
        self, proposal: Proposal, context: Context, row: Tensor, start: Tensor, here: Tensor
    ) -> Tensor:
        """Notes on the blocks of rows ``here``; returns ``[B, nodes]`` the leading nodes that are the text's."""
        N = min(proposal.nodes, self.k)
        n = torch.arange(N)
        at = (context.length[:, None] + n).clamp(max=self.ids.shape[1] - 1)
        wanted = self.ids[row[:, None], at]
        same = proposal.tokens[:, :N].cpu() == wanted
        laws = None if proposal.probs is None else proposal.distributions()[:, :N]
        if laws is None:
            q, most, entropy = same.double(), torch.ones(same.shape), torch.zeros(same.shape)
        else:
            q = laws.gather(2, wanted.to(laws.device)[..., None])[..., 0].double().cpu()
            most, entropy = (x.double().cpu() for x in (laws.amax(-1), torch.special.entr(laws).sum(-1)))
        exists = n < proposal.size[:, None]
        follows = (same & exists).long().cumprod(1)
        live = exists & (torch.nn.functional.pad(follows, (1, 0), value=1)[:, :-1] > 0)
        if laws is not None:
            inside = start[:, None] + n < self.last[row][:, None]
            self._must_follow(live[here] & (q[here] > 0) & ~same[here] & inside[here])
            if self.watch is not None and len(here):
                self.watch(
                    torch.tensor(self.which)[row[here]],
                    start[here],
                    laws[here.to(laws.device)],
                    (live & inside)[here],
                )
        q = torch.where(live, q, 0)
        p = self.own[row[:, None], start[:, None].clamp(min=0) + 1 + n]
        place = (row[here], start[here], slice(N))
        # A token that the target cannot give does not occur in a text.
        self.accept[place] = self.high[place] = torch.where(q > 0, chances(p, q), 0)[here]
        self.q[place], self.most[place], self.entropy[place] = (
            q[here],
            most[here].double(),
            entropy[here].double(),
        )
        self.size[row[here], start[here]] = live.sum(1)[here]
        return torch.nn.functional.pad(follows, (0, proposal.nodes - N)) > 0

    def _must_follow(self, strays: Tensor) -> None:
        """Raise ValueError for tokens that should have been the text's."""
        if not self.strays and bool(strays.any()):
            raise ValueError(
                "the draft's first candidate at a depth was not drawn by rng.categorical with Key(context.length, depth, 0), so it cannot be made "
                "to follow a text: draw it with this key, or use lab.simulate"
            )

    def _tree(self, proposal: Proposal, b: int, row: int, start: int, length: int) -> list[int]:
        """Notes on one row's tree, of which only the nodes on the text matter; returns these."""
        size = int(proposal.size[b])
        parents, tokens = proposal.parents[b, :size].tolist(), proposal.tokens[b, :size].tolist()
        shape: list[tuple[Any, ...]] = [()] * size  # of each subtree
        for n in reversed(range(size)):
            if parents[n] >= 0:
                shape[parents[n]] = (shape[n], *shape[parents[n]])
        path, law = [-1], self._law(self.which[row])
        sources = [] if proposal.probs is None else proposal.sources()[b].tolist()
        for depth in range(self.k):
            children = [n for n in range(size) if parents[n] == path[-1]]
            at = start + 1 + depth
            if not children or at >= len(law.probs):
                break
            x = int(self.ids[row, length + depth])
            on_text = [n for n in children if tokens[n] == x]
            self.size[row, start] = depth + 1
            if proposal.probs is None:
                self.accept[row, start, depth] = self.high[row, start, depth] = float(bool(on_text))
            else:
                drawn_from = [sources[n] for n in children]
                apart = self.siblings == "distinct"
                if len({shape[n] for n in children}) > 1:
                    raise ValueError(f"siblings have different subtrees{_NOT_STATIC}")
                if not apart and len(set(drawn_from)) > 1:
                    raise ValueError(f"siblings were drawn from different distributions{_NOT_STATIC}")
                laws = proposal.probs[b, drawn_from if apart else drawn_from[:1]].double().cpu()
                if apart and not _without_replacement(laws, [tokens[n] for n in children]):
                    raise ValueError(f"siblings were not drawn without replacement{_NOT_STATIC}")
                q = laws[0]
                self._must_follow(torch.tensor(not on_text and float(q[x]) > 0))
                self.q[row, start, depth] = q[x]
                both = _siblings(law, at, self.own[row, at], q, len(children), x, apart)
                self.accept[row, start, depth], self.high[row, start, depth] = both
            if not on_text:
                break
            path.append(on_text[0])
        return path[1:]


def _without_replacement(laws: Tensor, tokens: Sequence[int]) -> bool:
    """Whether each of ``laws [m, V]`` is the first one without the elder siblings' tokens, to the precision of a float32 sum."""
    left = laws[0].clone()
    for law, token in zip(laws, tokens):
        total = float(left.sum())
        if total <= 0 or float((law - left / total).abs().max()) > 1e-6 + 1e-7 / total:
            return False
        left[token] = 0
    return True


_NOT_STATIC = ": this is not a static tree of siblings that were drawn independently or without replacement, and a replay would be wrong; use lab.simulate"


def _siblings(
    law: Law, at: int, own: Tensor, q: Tensor, m: int, token: int, apart: bool
) -> tuple[Tensor, Tensor]:
    """Bounds of the probability that one of ``m`` siblings, drawn from ``q [V]``, was accepted as ``token``. ``apart``: without replacement."""
    x = torch.tensor(token)
    if law.ids is None:
        p = law.probs[at].double()
        each = distinct_chances(p, q, x, m, most=512) if apart else sibling_chances(p, q.expand(m, -1), x)
        exact = each.sum().clamp(max=1)
        return exact, exact
    known = Known(law.ids[at], law.probs[at].double(), law.rest[at].double(), x, own)
    if apart:
        low, high = (bound.sum().clamp(max=1) for bound in distinct_bounds(known, q, m))
        return low, high
    low, high = sibling_bounds(known, q, m, together=True)
    return low[-1], high[-1]
