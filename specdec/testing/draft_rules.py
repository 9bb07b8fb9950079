"""The rules of drafts, and the test of one proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import DraftInfo
from specdec.executors.round import check
from specdec.testing.rules import Rule
from specdec.types import Proposal
from specdec.verifiers.distinct import check_distinct
from specdec.verifiers.kseq import check_independent

DECLARATION = Rule(
    "declaration", "give it init, propose, observe and select, and info = DraftInfo(name, ...)"
)
FORM = Rule(
    "form",
    "return (Proposal, state) with int64 tokens [B, N], and parents [B, N] and size [B] on the CPU, 0 <= size <= N; "
    "sd.Proposal.chain makes one of tokens and size",
)
BUDGET = Rule(
    "budget", "give row b no path of more than budget[b] nodes, and none at all where budget[b] is 0"
)
STRUCTURE = Rule(
    "structure",
    "store each node's parent, or -1 for the last committed token, before the node, and declare trees=True if a node may have several "
    "children",
)
NODES = Rule("nodes", "declare the most nodes for each length, DraftInfo(..., nodes=lambda length: ...)")
VOCABULARY = Rule(
    "vocabulary", "propose ids below the target's vocab_size, which bind(target, sampling) is given"
)
PROBABILITIES = Rule(
    "probabilities", "give probs [B, N, V] (or [B, Q, V] with source) that are at least 0 and sum to 1"
)
PROVENANCE = Rule(
    "provenance",
    "draw each node by rng.categorical(q, key) and pass on that same q with provenance='sampled'; leave probs out for tokens that "
    "were chosen without randomness",
)
SIBLINGS = Rule(
    "siblings",
    "declare how the children of a node are drawn, DraftInfo(..., siblings=...), and let them carry it: 'independent' ones share a source, "
    "'distinct' ones each carry the first one's distribution without the tokens of elder ones; otherwise 'in turn'",
)
KEYS = Rule(
    "keys",
    "ask rng.categorical(probs, Key(context.length, depth, sibling)) for every random token, with a key of its own for each, and take "
    "numbers from nowhere else",
)
ANTICIPATION = Rule(
    "anticipation", "decide whether a node is submitted before it is drawn; submit every node that was drawn"
)
STATE = Rule(
    "state",
    "leave the given state as it is and return a new one: a NamedTuple with _replace, and tensors made by torch.where or cat instead "
    "of in-place changes",
)
REPEATABLE = Rule(
    "repeatable",
    "keep everything that is remembered in the state, not in the draft, and draw by the given rng only",
)
MATES = Rule(
    "mates",
    "compute a row from its own tokens, state and budget; never from the batch's size, maximum or other rows",
)
SELECT = Rule("select", "return the state of rows[0], rows[1], ... in that order, for every tensor in it")
JOIN = Rule("join", "return the state of self's rows and then other's, for every tensor in it")
OTHERS = Rule(
    "other drafts", "let observe take rounds whose proposal another draft made, of any width, or none"
)
CACHE = Rule(
    "cache",
    "call commit(round.context, round.verdict) of every cache in observe, for the proposal that it holds, and its select in select",
)
GREEDY = Rule("greedy", "keep the rules above: under a lossless verifier a draft cannot change a greedy text")
COUPLED = Rule("coupled", "keep the rules above: under Coupled a draft cannot change a sampled text")
LOSSLESS = Rule(
    "lossless", "keep the rules above; certify(decoder).distribution shows which texts are too likely"
)


def contract(info: DraftInfo, proposal: Proposal, budget: Tensor, vocab_size: int) -> None:
    """Everything that a proposal must be, for any draft and any budget ``[B]``."""
    tokens, parents, size = proposal.tokens, proposal.parents, proposal.size
    B = len(budget)
    whole = tokens.dtype == parents.dtype == size.dtype == torch.long
    fit = tokens.dim() == 2 and len(tokens) == B and parents.shape == tokens.shape and size.shape == (B,)
    FORM.require(
        whole and fit and parents.is_cpu and size.is_cpu,
        f"tokens are {list(tokens.shape)} {tokens.dtype}, parents {list(parents.shape)} {parents.dtype} and size {list(size.shape)} "
        f"{size.dtype} for {B} rows",
    )
    N = proposal.nodes
    FORM.require(bool(((size >= 0) & (size <= N)).all()), f"sizes are {size.tolist()} of {N} nodes")
    live = torch.arange(N) < size[:, None]
    with STRUCTURE.errors("a proposal"):
        tree.check(parents, size)
    if not info.trees:
        branched = (~tree.is_chain(parents, size)).nonzero()[:, 0].tolist()
        STRUCTURE.require(not branched, f"row {branched[:1]} is a tree and the draft declares chains")
    longest = ((tree.depths(parents) + 1) * live).amax(1) if N else torch.zeros_like(size)
    over = (longest > budget).nonzero()[:, 0].tolist()
    BUDGET.require(
        not over,
        f"row {over[:1]} has a path of {longest[over[:1]].tolist()} nodes, its budget is {budget[over[:1]].tolist()}",
    )
    bound = info.nodes(int(budget.max()))
    most = int(size.max()) if B else 0
    NODES.require(
        most <= bound, f"a row has {most} nodes for paths of {int(budget.max())}, and nodes() says {bound}"
    )
    outside = tokens[live & ((tokens < 0) | (tokens >= vocab_size)).cpu()].tolist()
    VOCABULARY.require(not outside, f"token {outside[:1]} of a vocabulary of {vocab_size}")
    PROVENANCE.require(
        proposal.provenance != "declared",
        "the probabilities are declared and not drawn from, which verifiers refuse",
    )
    if N:
        with PROBABILITIES.errors("a proposal"):
            check(proposal, budget, vocab_size)
    if proposal.probs is not None and bool(live.any()):
        q = proposal.distributions()[live].double()
        PROBABILITIES.require(bool((q >= 0).all()), "a probability is negative or NaN")
        off = float((q.sum(-1) - 1).abs().max())
        PROBABILITIES.require(off <= 1e-6, f"probabilities sum to 1 only within {off:.1e}")
    demands = {"independent": check_independent, "distinct": check_distinct}
    if N and info.siblings in demands:
        with SIBLINGS.errors(f"the check of siblings that are declared {info.siblings!r}"):
            demands[info.siblings](proposal, "a verifier that")
