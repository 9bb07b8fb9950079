# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# Speculative decoding in eight cells: first on exact tables, where every number can be checked, then on real (small) trained
# models. Nothing is downloaded.

# %%
import torch

import specdec as sd
from specdec import zoo
from specdec.audit.certify import certify
from specdec.data import prompts

torch.set_num_threads(1)  # one core, as in most of the figures of the documentation

# %% [markdown]
# ## 1. A model that fits in a line
#
# A `TableModel` is the distribution of the next token given the last `order` tokens. Plain decoding is the same engine without a draft: every
# round commits one token, so τ, the tokens a round, is 1.

# %%
target = sd.TableModel.random(vocab_size=6, order=2, seed=0)
texts = [[0], [1, 2, 3], [4, 5]]
plain = sd.decoder(target).build().generate(texts, max_new_tokens=40, seed=0)
print(plain)
assert plain.stats.tau == 1

# %% [markdown]
# ## 2. A function as a draft
#
# `prefix -> logits` is all that a draft needs. The library draws the tokens, keeps the distribution with each, and the verifier accepts
# or rejects them so that the output keeps the target's distribution. Acceptance is by position in the block, given that the position was reached.


# %%
@sd.chain_draft
def half_right(prefix):
    """Knows the target, but not well: its logits are halved."""
    return 0.5 * target.distribution(prefix).log()


drafted = sd.decoder(target).draft(half_right, length=3).build().generate(texts, max_new_tokens=40, seed=0)
print(drafted)
print("acceptance by position:", [round(share, 2) for share in drafted.stats.acceptance])
assert drafted.stats.tau > 1

# %% [markdown]
# ## 3. A tree
#
# Several candidates a node: when the first is rejected, the next is tried. Every round is a value that can be looked at. Parent -1
# is the last committed token; a node stands if it is on the accepted path.

# %%
small = sd.TableModel.random(vocab_size=6, order=2, seed=1)
tree = sd.decoder(target).draft(sd.drafts.Tree(small, widths=(3, 2)), length=2).build()
rounds = []
tree.generate([[0]], max_new_tokens=8, seed=1, on_round=rounds.append)
first = rounds[1]  # round 0 is the prefill
tokens, parents = first.proposal.tokens[0].tolist(), first.proposal.parents[0].tolist()
path = first.verdict.path[0].tolist()
for node, (token, parent) in enumerate(zip(tokens, parents)):
    print(f"node {node}: token {token} after node {parent:2}{'   stands' if node in path else ''}")
print("bonus token:", int(first.verdict.bonus[0]))

# %% [markdown]
# ## 4. Is it lossless? Compute it
#
# The certifier walks all randomness of a decoder with its real keys and adds up the probability of every text. The total variation from
# the target's distribution is zero up to rounding.

# %%
a, b = sd.TableModel.random(3, order=1, seed=0), sd.TableModel.random(3, order=1, seed=1)
small_tree = sd.decoder(a).draft(sd.drafts.Tree(b, widths=(2, 1)), length=2).build()
certificate = certify(small_tree, max_new_tokens=4)
print(certificate)
assert certificate.lossless

# %% [markdown]
# ## 5. Real models
#
# The pocket pair was trained on Python source; the prompts come from packages that neither model has seen. Prompts are ragged on
# purpose. Greedy text is that of plain decoding, whatever was drafted.

# %%
target, draft = sd.HFModel(*zoo.load("pocket-target")), sd.HFModel(*zoo.load("pocket-vanilla"))
base = sd.decoder(target).greedy()
decoder = base.draft(draft, length=4).build()
texts = [
    *prompts("code", n=2, tokens=96, tokenizer=target.tokenizer),
    *prompts("prose", n=2, tokens=40, tokenizer=target.tokenizer),
]
out = decoder.generate(texts, max_new_tokens=48)
assert out.texts == base.build().generate(texts, max_new_tokens=48).texts
print(out)

# %% [markdown]
# ## 6. One line a prompt

# %%
out.frame().drop(columns="text")

# %% [markdown]
# ## 7. Acceptance by position
#
# A position is reached when everything before it was accepted. The shares say how long a block is worth drafting.

# %%
stats = out.stats
for position, share in enumerate(stats.acceptance):
    bar = "#" * round(30 * share)
    print(f"position {position + 1}  reached {stats.reached[position]:3}  accepted {share:4.2f}  {bar}")
print(f"tau {stats.tau:.2f}: accepted tokens of a full round, and the bonus token")

# %%
# %matplotlib inline
stats.plot()

# %% [markdown]
# ## 8. As it comes
#
# `stream` gives each round's text as soon as it is committed. The last token of a piece is the target's own, the ones before it were
# drafted.

# %%
for piece in decoder.stream(texts[0], max_new_tokens=32):
    print(piece.text, end="|")
print(f"\n({piece.finish})")
