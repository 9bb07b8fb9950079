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
# # SPIN, part by part
#
# Chen et al., arXiv 2503.15921: a pool of unlike drafts, a selector that learns which one suits a request, verification of ragged batches
# without padding, and a pipeline of drafting and verification. Each part works alone; here they are put together one by one.

# %%
from collections import Counter

import pandas
import torch
from IPython import display

import specdec as sd
from specdec import selectors, zoo
from specdec.data import prompts
from specdec.executors import Pipelined, Timeline

torch.set_num_threads(1)  # one core, as in most of the figures of the documentation
model, tokenizer = zoo.load("pocket-target")
target = sd.HFModel(model, tokenizer)
names = ["140k", "360k", "700k", "900k"]
pool = {name: sd.HFModel(*zoo.load(f"pocket-{name}")) for name in names}
domains = ["code", "prose", "tabular"]

# %% [markdown]
# ## 1. What each draft is worth
#
# Tokens a round (tau) of every draft on prompts of every domain. Over many prompts, larger drafts have more in every domain, and they cost more; a
# lookup costs nothing, and its tau depends most on the text.

# %%
texts = {
    domain: prompts(domain, n=6, tokens=160, tokenizer=tokenizer, split="validation") for domain in domains
}
table = {
    name: {
        domain: sd.decoder(target).draft(draft, 4).build().generate(texts[domain], 32, seed=0).stats.tau
        for domain in domains
    }
    for name, draft in {**pool, "lookup": sd.drafts.NGram()}.items()
}
pandas.DataFrame(table).T.round(2)

# %% [markdown]
# ## 2. A selector chooses
#
# Arms are drafts, draft lengths, or "do not speculate" (`None`). The selector sees arm numbers and what came of them, never a token. Whatever
# it chooses, the text has the target's distribution.

# %%
arms = {**pool, "900k, 2": sd.Arm(pool["900k"], 2), "lookup": sd.drafts.NGram(), "none": None}
chosen: Counter[str] = Counter()
builder = sd.decoder(target).pool(arms, selectors.Spin(exploration=2), length=4)
mixed = [text for domain in domains for text in texts[domain][:2]]


def count(round):
    if round.number:
        chosen.update(list(arms)[arm] for arm in round.arm.tolist())


out = builder.build().generate(mixed, 48, seed=0, on_round=count)
print(chosen)
out.frame()[["row", "new_tokens", "tau", "rounds"]]

# %% [markdown]
# ## 3. The choice changes the speed, not the text
#
# Under `Coupled` sampled text is plain sampling's, bit for bit, whatever was drafted by whom, in whatever order.

# %%
plain = sd.decoder(target).verifier(sd.Coupled()).build().generate(mixed, 24, seed=1)
coupled = builder.verifier(sd.Coupled())
assert coupled.build().generate(mixed, 24, seed=1).ids == plain.ids

# %% [markdown]
# ## 4. A pipeline
#
# Two micro-batches: the drafts work on one while the target verifies the other. A draft that a request will change to reads its text while the old
# one still works for it.

# %%
line = Timeline()
piped = coupled.executor(Pipelined(2, timeline=line)).build()
assert piped.generate(mixed, 24, seed=1).ids == plain.ids
line.plot("line.png")
display.Image("line.png", width=700)

# %%
{worker: f"busy {share:.0%}" for worker, share in line.busy().items()}

# %% [markdown]
# ## 5. Verification without padding
#
# The requests differ in length. `decomposed` cuts long ones into fragments and merges the parts exactly; `padded` is the paper's baseline.

# %%
for attention in ("padded", "packed", "decomposed"):
    other = sd.HFModel(model, tokenizer, attention=attention)
    again = sd.decoder(other).draft(pool["900k"], 4).greedy().build().generate(mixed, 16)
    print(f"{attention:11} {again.stats.tokens_per_second:5.0f} tokens/s")
