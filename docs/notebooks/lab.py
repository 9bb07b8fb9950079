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
# # Which draft, and is it faster than plain?
#
# A target is recorded once. Every question about drafts, block lengths and verifiers is then answered from the record, without the noise of
# the drafts' draws. Only the seconds of rounds are measured on this machine.

# %%
import tempfile

import torch

import specdec as sd
from specdec import lab, zoo
from specdec.audit import lengths

torch.set_num_threads(1)
target = sd.HFModel(*zoo.load("pocket-target"))
small, tiny = (sd.HFModel(*zoo.load(name)) for name in ("pocket-vanilla", "pocket-tiny"))
entries = lab.prompt_file.pieces(lab.prompt_file.shipped(12), target.tokenizer, 64, 1)

# %% [markdown]
# ## 1. Record
#
# The target continues 12 held-out prompts. The trace has its distribution at every position, and names the target by fingerprint.

# %%
trace = lab.record(target, entries, tempfile.mkdtemp(), new_tokens=32, k=6, eos_token_id=(), progress=False)
print(trace)

# %% [markdown]
# ## 2. Replay
#
# Each draft follows the recorded texts once. Block verification and a policy of stopping need no further run.

# %%
replays = {
    "vanilla": lab.replay(trace, small),
    "tiny": lab.replay(trace, tiny),
    "ngram": lab.replay(trace, sd.drafts.NGram()),
}
replays["vanilla, stops"] = replays["vanilla"].stopping(lambda seen: lengths.before(seen.most > 0.4))
print(*replays.values(), sep="\n")

# %%
compared = lab.compare(replays, k=(2, 6), by_category=False)
compared.frame()[["method", "k", "tau", "tau_low", "tau_high", "ratio", "ratio_low", "ratio_high"]].round(2)

# %%
# %matplotlib inline
compared.plot()

# %%
verifiers = {"rejection": replays["vanilla"], "block": replays["vanilla"].under("block")}
columns = ["method", "k", "tau", "ratio", "ratio_low", "ratio_high"]
lab.compare(verifiers, k=(2, 4, 6), by_category=False).frame()[columns].round(3)

# %% [markdown]
# ## 3. Time whole rounds on this machine

# %%
decoders = [("plain", sd.decoder(target).build())]
for name, draft in (("vanilla", small), ("tiny", tiny), ("ngram", sd.drafts.NGram())):
    decoders += [(name, sd.decoder(target).draft(draft, length=k).build()) for k in (2, 6)]
prompts = [list(entry.given) for entry in entries]
times = lab.time(decoders, prompts, batches=(1, 8), contexts=(64,), rounds=6)
print(times)

# %% [markdown]
# ## 4. Decide

# %%
decision = lab.decide({name: replays[name] for name in ("vanilla", "tiny", "ngram")}, times, k=(2, 6))
print(decision)

# %%
best = decision.frame().query("rank == 1")
best[["batch", "method", "k", "tau", "ratio", "ratio_low", "ratio_high", "close"]].round(2)
