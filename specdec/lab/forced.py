"""Parts of a decoder that follows a recorded text: forced draws, a verifier that takes notes, and a target that is not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specdec import tree
from specdec.audit.siblings import sibling_chances
from specdec.audit.tau import chances
from specdec.audit.truncated import Known, sibling_bounds
from specdec.capabilities import VerifierInfo
from specdec.lab.traces import Law, Trace
from specdec.models.table import TableCache
from specdec.rng import Key, Philox, Rng
from specdec.types import Context, Fed, Proposal, Scores, Verdict


class Forced:
    """An ``Rng`` whose first candidate at every depth is the text's token; tokens that cannot be drawn, and other candidates, come from keys.

    Args:
        texts: ``[C, T]`` ids from the first token of the prompt on, padded. rows: ``[B]`` the text of each row. strays: draws that leave the text
            from some depth on, for the check that a draft does not remember them.
    """

    def __init__(self, texts: Tensor, rows: Tensor, other: Philox, strays: bool = False):
        self.texts, self.rows, self.other, self.strays = texts, rows, other, strays

    def select(self, rows: Tensor) -> Forced:
        return Forced(self.texts, self.rows[rows], self.other.select(rows), self.strays)

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        drawn = self.other.categorical(probs, key)
        at, depth, sibling = torch.broadcast_tensors(*(torch.as_tensor(part) for part in key[:3]))
        place = (at + depth).clamp(max=self.texts.shape[1] - 1)
        rows = self.rows.view(-1, *[1] * (at.dim() - 1)).expand(at.shape)
        token = self.texts[rows, place].to(drawn.device)
        possible = probs.gather(-1, token[..., None])[..., 0] > 0
        follows = (sibling == 0).to(drawn.device) & possible
        if self.strays:
            follows &= (depth < at % 3).to(drawn.device)
        return torch.where(follows, token, drawn)

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return self.other.accept(prob, key)

    def race(self, probs: Tensor, position: Tensor) -> Tensor:
        raise ValueError(
            "a draft that draws by races (Coupled) cannot be replayed: replay it under Rejection"
        )


@dataclass(eq=False)
class Recorder:
    """A verifier that accepts nothing, commits the text's next token, and notes what the draft would have done along the text.

    Args:
        trace: of the texts. which: ``[C]`` numbers of texts, one a row. ids: ``[C, T]`` their tokens, padded. prompt: ``[C]`` tokens of the prompts.
            k: the longest path.
    Attributes:
        q: ``[C, n, k]`` float64: the probability with which the draft drew the text's token at each depth of a block that starts at each position,
            given that it had drawn those before; 1 for a token chosen without randomness, 0 for one that was not proposed.
        accept: ``[C, n, k]`` the probability, given the text, that the token came from the draft if those before it did.
        high: ``[C, n, k]`` the same as ``accept``, unless the trace has only the largest probabilities, which bound the chances of siblings.
        most, entropy: ``[C, n, k]`` the largest probability of the distribution there, and its entropy in nats.
        size: ``[C, n]`` how many of the text's tokens were proposed or might have been. chains: whether all proposals were chains.
    """

    trace: Trace
    which: list[int]
    ids: Tensor
    prompt: Tensor
    k: int
    info: VerifierInfo = VerifierInfo("recorder", lossless=True)

    def __post_init__(self) -> None:
        texts = [self.trace.texts[i] for i in self.which]
        self.rounds = torch.tensor([t.rounds for t in texts])
        C, n = len(texts), int(self.rounds.max())
        self.q, self.accept, self.high, self.most, self.entropy = torch.zeros(
            5, C, n, self.k, dtype=torch.float64
        )
        self.size, self.chains = torch.zeros(C, n, dtype=torch.long), True
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
        if proposal.nodes:
            here = ((start >= 0) & (start < self.rounds[row])).nonzero()[:, 0]
            if bool(tree.is_chain(proposal.parents, proposal.size).all()):
                self._chain(proposal, context, row, start, here)
            else:
                self.chains = False
                for b in here.tolist():
                    self._tree(proposal, b, int(row[b]), int(start[b]), int(context.length[b]))
        bonus = self.ids[row, context.length.clamp(max=self.ids.shape[1] - 1)]
        none = torch.zeros_like(context.length)
        nodes = torch.full(proposal.tokens.shape, -1)
        return Verdict.of(proposal, nodes, none, bonus, checked=True)

    def _chain(self, proposal: Proposal, context: Context, row: Tensor, start: Tensor, here: Tensor) -> None:
        N = min(proposal.nodes, self.k)
        n = torch.arange(N)
        at = (context.length[:, None] + n).clamp(max=self.ids.shape[1] - 1)
        wanted = self.ids[row[:, None], at]
        drafted = proposal.tokens[:, :N].cpu()
        laws = None if proposal.probs is None else proposal.distributions()[:, :N]
        if laws is None:
            q = (drafted == wanted).double()
        else:
            q = laws.gather(2, wanted.to(laws.device)[..., None])[..., 0].double().cpu()
        before = (drafted == wanted).long().cumprod(1)
        before = torch.cat(
            [torch.ones_like(before[:, :1]), before[:, :-1]], 1
        )  # the tokens before are the text's
        live = (n < proposal.size[:, None]) & (before > 0)
        q = torch.where(live, q, 0)
        p = self.own[row[:, None], start[:, None].clamp(min=0) + 1 + n]
        # A token that the target cannot give does not occur in a text.
        taken = torch.where(q > 0, chances(p, q), 0)
        if laws is not None:
            self.most[row[here], start[here], :N] = laws.amax(-1).double().cpu()[here]
            self.entropy[row[here], start[here], :N] = torch.special.entr(laws).sum(-1).double().cpu()[here]
        self.q[row[here], start[here], :N] = q[here]
        self.accept[row[here], start[here], :N] = self.high[row[here], start[here], :N] = taken[here]
        self.size[row[here], start[here]] = live.sum(1)[here]

    def _tree(self, proposal: Proposal, b: int, row: int, start: int, length: int) -> None:
        """One row's tree: only the nodes on the text matter."""
        size = int(proposal.size[b])
        parents, tokens = proposal.parents[b, :size].tolist(), proposal.tokens[b, :size].tolist()
        below = [1] * size  # nodes of each subtree
        for n in reversed(range(size)):
            if parents[n] >= 0:
                below[parents[n]] += below[n]
        node, law = -1, self._law(self.which[row])
        for depth in range(self.k):
            children = [n for n in range(size) if parents[n] == node]
            if not children or start + 1 + depth >= len(law.probs):
                break
            x, at = int(self.ids[row, length + depth]), start + 1 + depth
            on_text = [n for n in children if tokens[n] == x]
            self.size[row, start] = depth + 1
            if proposal.probs is None:
                self.accept[row, start, depth] = self.high[row, start, depth] = float(bool(on_text))
            else:
                sources = {int(proposal.sources()[b, n]) for n in children}
                if len({below[n] for n in children}) > 1 or len(sources) > 1:
                    raise ValueError(
                        "the draft's trees differ below siblings, or siblings are drawn without replacement: this is not a static tree of "
                        "independent siblings; measure it with lab.simulate"
                    )
                q = proposal.probs[b, sources.pop()].double().cpu()
                self.q[row, start, depth] = q[x]
                both = _siblings(law, at, self.own[row, at], q, len(children), x)
                self.accept[row, start, depth], self.high[row, start, depth] = both
            if not on_text:
                break
            node = on_text[0]


def _siblings(law: Law, at: int, own: Tensor, q: Tensor, m: int, token: int) -> tuple[Tensor, Tensor]:
    """Bounds of the probability that one of ``m`` independent siblings, drawn from ``q [V]``, was accepted as ``token``."""
    x = torch.tensor(token)
    if law.ids is None:
        exact = sibling_chances(law.probs[at].double(), q.expand(m, -1), x).sum().clamp(max=1)
        return exact, exact
    known = Known(law.ids[at], law.probs[at].double(), law.rest[at].double(), x, own)
    low, high = sibling_bounds(known, q, m, together=True)
    return low[-1], high[-1]


class Recorded:
    """The target of a trace, as far as it was recorded: laws after the committed text, and activations, where there are any.

    It stands in for the target where a draft reads nothing else, so that a replay does not compute the target again.
    """

    supports_trees = True

    def __init__(self, trace: Trace, which: Sequence[int], ids: Tensor, prompt: Tensor):
        self.trace, self.vocab_size, self.ids, self.prompt = trace, trace.vocab_size, ids, prompt
        laws = [trace.law(i) for i in which]
        self.laws = laws if trace.whole else None
        self.activations = [trace.activations(i) for i in which] if trace.taps else []

    def cache(self, batch: int, capacity: int) -> TableCache:
        return TableCache(torch.zeros(batch, dtype=torch.long))

    def prefill(self, cache: TableCache, context: Context, rows: Tensor | None = None) -> None:
        """Does nothing."""

    def score(
        self,
        cache: TableCache,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """The recorded logits after the committed text; those after nodes are uniform, since no node is accepted."""
        N = 0 if proposal is None else proposal.nodes
        logits = torch.zeros(context.batch, N + 1, self.vocab_size)
        if self.laws is not None:
            for b, text in enumerate(context.request.tolist()):
                law = self.laws[text].probs
                logits[b, 0] = law[min(int(context.length[b] - self.prompt[text]), len(law) - 1)].log()
        fed = self._fed(cache, context, proposal, taps) if taps else None
        cache.length = context.length
        return Scores(logits, fed)

    def _fed(
        self, cache: TableCache, context: Context, proposal: Proposal | None, taps: Sequence[int]
    ) -> Fed:
        row, position, node, values = [], [], [], []
        depths = None if proposal is None else tree.depths(proposal.parents)
        for b, text in enumerate(context.request.tolist()):
            first, length = int(cache.length[b]), int(context.length[b])
            at = list(range(first, length))
            nodes = [-1] * len(at)
            if proposal is not None and depths is not None:
                size = int(proposal.size[b])
                at += (length + depths[b, :size]).tolist()
                nodes += range(size)
            held = self.activations[text]
            values.append(held[torch.tensor(at).clamp(max=len(held) - 1)])
            row += [b] * len(at)
            position += at
            node += nodes
        which = [self.trace.taps.index(tap) for tap in taps]
        every = torch.cat(values)
        layers = {tap: every[:, i] for tap, i in zip(taps, which)}
        return Fed(layers, torch.tensor(row), torch.tensor(position), torch.tensor(node))
