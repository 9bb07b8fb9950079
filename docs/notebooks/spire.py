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
# # SPIRe, part by part
#
# Neelam et al., arXiv 2504.06419: a draft made of a few of the target's own blocks, with sparse attention, the target's activations, and
# feedback memory. Here each part is taken in the hand, on the pocket models that come with the package.

# %%
import pandas
import torch

import specdec as sd
from specdec import zoo
from specdec.audit.tau import efficiency, parallel_chances, spire_chances
from specdec.data import prompts
from specdec.drafts.spire import SpireModel
from specdec.masks import Causal, Sinks, Window

torch.set_num_threads(1)  # one core, as in most of the figures of the documentation
model, tokenizer = zoo.load("pocket-target")
small, _ = zoo.load("pocket-vanilla")
trained, _ = zoo.load("pocket-spire")
target = sd.HFModel(model, tokenizer)
print(trained)

# %% [markdown]
# ## 1. What the draft sees
#
# A few first positions (sinks) and a window, at positions of the original text. A mask is a small object; `&` and `|` compose.

# %%
mask = Causal() & (Sinks(1) | Window(6))
print(mask.show(length=16))

# %% [markdown]
# ## 2. A draft in one line
#
# The last two blocks, the embedding and the head are *copied*: the target stays as it is. Untrained, it is a poor draft: block 7 has
# never seen a raw embedding. The trained one comes with the package.

# %%
untrained = SpireModel.from_target(model, layers=2, sinks=1, window=64)
ids = [tokenizer(text)["input_ids"][:256] for text in prompts(n=6)]
table = {}
for name, draft in {
    "vanilla": sd.drafts.Model(sd.HFModel(small, tokenizer)),
    "MagicDec": sd.drafts.MagicDec(window=64, sinks=1),
    "SPIRe, untrained": sd.drafts.Spire(untrained),
    "SPIRe": sd.drafts.Spire(trained),
}.items():
    out = sd.decoder(target).draft(draft, length=4).build().generate(ids, 32, seed=0, eos_token_id=())
    table[name] = {
        "tau": out.stats.tau,
        "acceptance by position": [round(a, 2) for a in out.stats.acceptance],
    }
pandas.DataFrame(table).transpose()

# %% [markdown]
# Which of them drafts changes the speed, never the text: under `Coupled`, sampled text is the same to the bit.

# %%
coupled = sd.decoder(target).verifier(sd.Coupled())
plain = coupled.build().generate(ids, 24, seed=1, eos_token_id=())
drafted = coupled.draft(sd.drafts.Spire(trained), 4).build().generate(ids, 24, seed=1, eos_token_id=())
assert drafted.ids == plain.ids
print("the same text, at", round(drafted.stats.tau, 2), "tokens a round")

# %% [markdown]
# ## 3. What the memory learnt
#
# At positions of the block, layer i attends to a mixture of all the draft's activations there. These are the shares; row i is layer i's
# memory, columns are the embedding and the outputs of the two blocks.

# %%
trained.memory.weights.softmax(-1).detach()

# %% [markdown]
# ## 4. τ without noise
#
# On a text that was sampled from the target, the chance that a token came from the draft is `min(1, q / p)`, and a small dynamic
# programme over block starts gives the expected number of rounds. Nothing is drawn but the text.

# %%
context, n, k = 192, 24, 4
starts = [row[:context] for row in ids]
texts = sd.decoder(target).build().generate(starts, 1 + n + k, seed=2, eos_token_id=()).ids
tokens = torch.tensor([a + b for a, b in zip(starts, texts)])
with torch.no_grad():
    said = model(tokens[:, :-1], output_hidden_states=True)
    vanilla = parallel_chances(said.logits, small(tokens[:, :-1]).logits, tokens, context + 1, k)
    inputs = {layer: said.hidden_states[layer] for layer in trained.layers}
    spire = spire_chances(trained, said.logits, inputs, tokens, context + 1, k)
for name, accept in {"vanilla": vanilla, "SPIRe": spire}.items():
    by_k = [round(efficiency(accept[:, :n], k=kk).tau, 2) for kk in (1, 2, 3, 4)]
    print(f"{name:8} tau for k = 1, 2, 3, 4: {by_k}")
assert 1 < efficiency(spire[:, :n]).tau <= k + 1

# %% [markdown]
# ## 5. What it would be worth elsewhere
#
# The paper's throughput model, with the paper's models and machine, at its headline point.

# %%
from specdec.cost import H100_PAPER, Load, paper  # noqa: E402

load = Load(batch=64, context=512, k=4)
rows = {}
for name, method in paper.METHODS.items():
    one = method.round(paper.TARGET, load)
    tau = paper.TAU[512][name]
    rows[name] = {
        "tau": tau,
        "round, in steps": one.cost(H100_PAPER),
        "multiplier": one.multiplier(tau, H100_PAPER),
    }
modelled = pandas.DataFrame(rows).transpose()
modelled.round(2)

# %%
# %matplotlib inline
axes = modelled["multiplier"].plot.bar(figsize=(5, 2.6), rot=0, ylabel="over plain decoding")
