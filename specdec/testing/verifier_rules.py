"""The rules of verifiers."""

from __future__ import annotations

from specdec.testing.rules import Rule

DECLARATION = Rule(
    "declaration",
    "declare info = VerifierInfo(name, lossless=...), with 'lossy' in the name of one that changes the distribution, and a shortcut only "
    "where its method is defined",
)
CHECK = Rule(
    "check",
    "let check(proposal) raise ValueError for what cannot be verified exactly, and return for all else",
)
PATH = Rule(
    "path",
    "give Verdict.of(proposal, path, accepted, bonus) a path from the root, each node a child of the one before",
)
ARGUMENTS = Rule("arguments", "do not change proposal, probs or context in place: clone, or use torch.where")
SUPPORT = Rule(
    "support",
    "accept where u < p / q, so that p = 0 is never accepted, and draw from weights that are 0 where p is; where a residual is all zero "
    "draw from p",
)
SHORTCUT = Rule("shortcut", "let greedy and from_logits decide as __call__ does, or do not declare them")
MATES = Rule(
    "mates",
    "decide a row from its own nodes, probabilities and keys; never from the batch's size or other rows",
)
ABSENT = Rule(
    "absent nodes", "mask by n < size[b] before anything is read from node n, its parent or its source"
)
SHARED = Rule("shared distributions", "read proposal.q(n), q_of or distributions(), not probs[:, n]")
EMPTY = Rule("empty", "draw the next token from probs[:, 0] where a row has no nodes")
KEYS = Rule(
    "keys",
    "give each decision a key of its own: Key(context.length, depth, sibling, ACCEPT or BONUS), and take numbers from nowhere else",
)
DISTRIBUTION = Rule(
    "lossless",
    "draw the token after a rejected node from norm(max(p - q, 0)) and not from p; test node n with its own q, proposal.q(n), and with the p "
    "before it, probs[:, 1 + parent]; or declare lossless=False if it is meant to change the distribution. sd.certify(verifier).worst() shows "
    "texts that are too likely",
    raised="change what the message says. Where a row has fewer nodes than others, q(n) and distributions() are safe to read; tokens, probs[:, n] "
    "and q_of(tokens) are not masked, so mask them by n < size[b] before they index, divide or decide",
)
DECLARED = Rule("declared probabilities", "refuse provenance='declared' in check unless q is not used")
DRAWS = Rule(
    "draws",
    "let for_draft(rng) return decisions with rng's distributions, which follow their rows: rng itself, usually",
)
