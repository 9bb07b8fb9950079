"""Stage g of the GPU suite: whole models are right. Logits of two layers of the 8B shape, and texts with graphs against texts without.

The reference is transformers' forward of the same weights in float32. A plain step, a chain and a tree are scored in ragged rows, by
each way in which ``HFModel`` runs: from Python, by CUDA graphs over slots and over pages, and by graphs of a compiled model.
``max_error`` is the largest error of a node's logits, and its limit is twice that of transformers' own forward in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

import specdec as sd
from recipes.gpu.cases import PARENTS
from recipes.gpu.stage import Part, Stage
from recipes.gpu.steps import COMPILED, EAGER, GRAPHS, config, llama, stopped, wrapped
from specdec.drafts.heads import DFlash, DSpark, DynamicTree, Eagle3, PEagle
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead, Serial
from specdec.lab.captured import captured
from specdec.lab.errors import worst

LENGTHS, TOY_LENGTHS = (700, 33, 256), (20, 3, 9)
PAGES = "graphs, pages"
PAGE = 16  # slots, so that a row has many pages
NOISE = 0.1  # of the draft's weights, over the spread of the target's
TIMES = 3  # a shape is captured at its second use, and replayed at its third


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    stage.parts({"logits": Part(0.6, logits), "texts": Part(0.4, texts)})


def proposals(stage: Stage, rows: int, vocab_size: int) -> Iterator[tuple[str, sd.Proposal | None]]:
    """What is scored after the texts: name and proposal."""
    host = torch.Generator().manual_seed(stage.seed)
    yield "plain step", None
    for name, parents in (("verify 6", tuple(range(-1, 4))), ("tree of 7", PARENTS)):
        tokens = torch.randint(0, vocab_size, (rows, len(parents)), generator=host)
        size = torch.full((rows,), len(parents))
        if name == "verify 6":
            size[-1] -= 2  # ragged
        tree = torch.tensor([parents] * rows)
        yield name, sd.Proposal(tokens.to(stage.device), tree, size)


def logits(stage: Stage) -> None:
    """Of two layers, after the last token of each text and after each node."""
    model = llama(stage, layers=2)
    if model is None:
        return
    exact = copy.deepcopy(model).float()
    lengths = TOY_LENGTHS if stage.toy else LENGTHS
    host = torch.Generator().manual_seed(stage.seed)
    text = [torch.randint(0, model.config.vocab_size, (n,), generator=host).tolist() for n in lengths]
    context = sd.Context.of(text, max(lengths) + 16)
    models = wrapped(model)
    pages = sd.HFModel(model, prefill_chunk=8192, graphs=models[GRAPHS].graphs, page=PAGE)
    models |= {PAGES: pages, COMPILED: models.pop(COMPILED)}  # the one that must be compiled last
    wanted: dict[str, tuple[list[Tensor], float]] = {}
    every = list(proposals(stage, len(text), model.config.vocab_size))
    for what, nodes in every:
        if not stage.late(what):
            with stage.case(what, "logits"):
                exactly = by_node(exact, text, nodes)
                wanted[what] = exactly, 2 * worst_of(by_node(model, text, nodes), exactly)
    for kind, one in models.items():
        for what, nodes in every:
            case = f"logits, {what}: {kind}"
            if what not in wanted or (stage.toy and kind == COMPILED) or stage.late(case):
                continue
            with stage.case(case, "logits"):
                exactly, limit = wanted[what]
                cache = one.cache(len(text), max(lengths) + 16)
                one.prefill(cache, context)
                for _ in range(1 if kind == EAGER else TIMES):
                    made = one.score(cache, context, nodes).logits
                found = [made[b, i] for b, i in places(nodes, len(text))]
                same = sum(int(a.argmax() == b.argmax()) for a, b in zip(found, exactly))
                stage.row(
                    case, error=worst_of(found, exactly), limit=limit, bound=limit, bar="logits", same_argmax=same / len(exactly),
                    **({} if kind == EAGER else stopped(one)),
                )  # fmt: skip
                del cache


def places(nodes: sd.Proposal | None, rows: int) -> list[tuple[int, int]]:
    """Row and entry of the logits that are compared: those after a text, and after each node that exists."""
    size = [0] * rows if nodes is None else nodes.size.tolist()
    return [(b, i) for b in range(rows) for i in range(size[b] + 1)]


def by_node(model: Any, text: list[list[int]], nodes: sd.Proposal | None) -> list[Tensor]:
    """The same logits by transformers, a forward for each path."""
    found = []
    for b, i in places(nodes, len(text)):
        path: list[int] = []
        node = i - 1
        while node >= 0 and nodes is not None:
            path.append(int(nodes.tokens[b, node]))
            node = int(nodes.parents[b, node])
        ids = torch.tensor([text[b] + path[::-1]], device=model.device)
        found.append(model(ids, logits_to_keep=1).logits[0, -1])
    return found


def worst_of(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error of a node's logits."""
    return worst(torch.stack(found)[None, None], torch.stack(wanted).double()[None, None])


def decoded(decoder: sd.Decoder, prompts: list[list[int]], new: int) -> tuple[list[list[int]], sd.Stats]:
    """Texts of a batch."""
    out = decoder.generate(prompts, new, seed=0, eos_token_id=())
    return out.ids, out.stats


def streamed(
    decoder: sd.Decoder, prompts: list[list[int]], new: int, cold: sd.Sampling
) -> tuple[list[list[int]], sd.Stats]:
    """Texts of a stream with room for two requests, so that later ones join, all but the last one with the sampling ``cold``; that one is sampled, and
    left out. With whole rounds of trees none has a sampling of its own."""
    same = isinstance(decoder.executor, Ahead) and isinstance(decoder.draft, sd.drafts.Tree)
    hot = None if same else sd.Sampling(0.9, top_p=0.9, top_k=50)
    requests = [sd.Request(ids, new, sampling=None if same else cold) for ids in prompts]
    more = [sd.Request(prompts[0], new, sampling=hot)]
    stream = decoder.serve([*requests, *more], 2, seed=0, eos_token_id=(), own_sampling=not same)
    made = sorted(stream, key=lambda one: one.index)[: len(prompts)]
    return [one.ids for one in made], sum((one.stats for one in made[1:]), start=made[0].stats)


def found(*models: sd.HFModel) -> list[int]:
    """How many tokens of prompts each model's prefix cache has had."""
    return [0 if model.prefixes is None else model.prefixes.found for model in models]


def no_tenth(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor: no token whose number ends with 3."""
    tenth = torch.arange(scores.shape[-1], device=scores.device) % 10 == 3
    return scores.masked_fill(tenth, -torch.inf)


def restricted(vocab_size: int) -> sd.Sampling:
    """Greedy, with that processor, under a grammar in which even and odd tokens alternate, and every seventh token is 0."""
    odd = [t % 2 == 1 for t in range(vocab_size)]
    rows = [[s + 1 if odd[t] == (s % 2 == 1) else -1 for t in range(vocab_size)] for s in range(6)]
    rows.append([-1 if t else 0 for t in range(vocab_size)])
    return sd.Sampling(0.0, processors=(no_tenth,), grammar=sd.grammars.Table(rows))


def texts(stage: Stage) -> None:
    """Greedy texts of small models in float32, plain and speculative, with graphs and without: all are the same, and so are those under a grammar and a
    processor."""
    made = config(True)
    if not stage.toy:
        made.update({"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
                     "vocab_size": 4096, "head_dim": 64})  # fmt: skip
    torch.manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        raw = [LlamaForCausalLM(made).to(stage.device).eval().requires_grad_(False)]
        raw.append(copy.deepcopy(raw[0]))
        for p in raw[1].parameters():  # a draft whose tokens are accepted at times
            p.add_(torch.randn_like(p) * NOISE * p.std())
    new = 8 if stage.toy else 64
    host = torch.Generator().manual_seed(stage.seed)
    prompts = [torch.randint(0, made.vocab_size, (n,), generator=host).tolist() for n in (140, 7, 19)]
    graphs: Any = True if stage.device.type == "cuda" else "eager"
    plain, limited = sd.Sampling(0.0), restricted(made.vocab_size)
    firsts: dict[bool, list[list[int]]] = {}
    accepted: dict[str, int] = {}  # by the first row of each draft, without graphs
    for how in (False, graphs):
        target, small = (sd.HFModel(model, graphs=how) for model in raw)
        pages, small_pages = (sd.HFModel(model, graphs=how, page=PAGE) for model in raw)
        keeping, small_keeping = (sd.HFModel(model, graphs=how, prefix_cache=2**26) for model in raw)
        spire = SpireModel.from_target(target, made.num_hidden_layers, window=16, feedback=False)
        head, block = Eagle3.from_target(target), DSpark.from_target(target, blocks=1)
        window = DFlash.from_target(target, blocks=2, block_size=5, windows=[16, None])
        levels = PEagle.from_target(target)
        named = {
            "the target": target,
            "the draft": small,
            "the target, pages": pages,
            "the draft, pages": small_pages,
            "the target, prompts kept": keeping,
            "the draft, prompts kept": small_keeping,
        }
        broken: set[str] = set()  # whose captures have failed; they begin anew
        late = False  # whether the time was up before a case, of which a model may have run none then
        for name, draft in (
            ("plain", None),
            ("a model's chain", sd.drafts.Model(small)),
            ("plain, whole rounds", None),
            ("a model's chain, whole rounds", sd.drafts.Model(small)),
            ("SPIRe", sd.drafts.Spire(spire, graphs=how)),
            ("SPIRe, whole rounds", sd.drafts.Spire(spire, graphs=how)),
            ("a head", sd.drafts.Head(head, graphs=how)),
            ("a head, whole rounds", sd.drafts.Head(head, graphs=how)),
            ("a head's tree", sd.drafts.Head(head, DynamicTree(4, 4, 20), graphs=how)),
            ("a head's tree, whole rounds", sd.drafts.Head(head, DynamicTree(4, 4, 20), graphs=how)),
            ("a head's block", sd.drafts.Head(block, graphs=how)),
            ("a head's block, whole rounds", sd.drafts.Head(block, graphs=how)),
            ("a head's block with a window", sd.drafts.Head(window, graphs=how)),
            ("a head's block with a window, whole rounds", sd.drafts.Head(window, graphs=how)),
            ("a head's levels at once", sd.drafts.Head(levels, graphs=how)),
            ("a head's levels at once, whole rounds", sd.drafts.Head(levels, graphs=how)),
            ("a tree", sd.drafts.Tree(small, (2, 2))),
            ("a tree, whole rounds", sd.drafts.Tree(small, (2, 2))),
            ("a windowed model's chain", sd.drafts.Model(sd.models.Windowed(target, 16, 2))),
            ("a windowed model's chain, whole rounds", sd.drafts.Model(sd.models.Windowed(target, 16, 2))),
            ("MagicDec", sd.drafts.MagicDec(window=16, sinks=2)),
            ("MagicDec, whole rounds", sd.drafts.MagicDec(window=16, sinks=2)),
            ("a tree, pages", sd.drafts.Tree(small_pages, (2, 2))),
            ("a tree, pages, whole rounds", sd.drafts.Tree(small, (2, 2))),
            ("a model's chain, pages", sd.drafts.Model(small_pages)),
            ("a model's chain, pages, whole rounds", sd.drafts.Model(small)),
            ("a model's chain, a stream", sd.drafts.Model(small)),
            ("a model's chain, a stream, whole rounds", sd.drafts.Model(small)),
            ("a model's chain, prompts kept", sd.drafts.Model(small_keeping)),
            ("SPIRe, prompts kept", sd.drafts.Spire(spire, graphs=how)),
            ("plain, a grammar", None),
            ("a model's chain, a grammar", sd.drafts.Model(small)),
            ("a model's chain, a grammar, a stream", sd.drafts.Model(small)),
            ("a tree, a grammar", sd.drafts.Tree(small, (2, 2))),
            ("forced tokens and a model's chain, a grammar", sd.drafts.JumpForward(sd.drafts.Model(small))),
        ):
            ahead = name.endswith("whole rounds")
            case = f"greedy text, {name}, {'with' if how else 'without'} graphs"
            if ahead and not how:
                continue
            if stage.late(case):
                late = True
                continue
            with stage.case(case, "texts"):
                limits, keeps = ", a grammar" in name, ", prompts kept" in name
                sampling = limited if limits else plain
                one = pages if ", pages" in name else keeping if keeps else target
                base = sd.decoder(one).sampling(sampling).executor(Ahead() if ahead else Serial())
                decoder = (base if draft is None else base.draft(draft)).build()
                before = found(keeping, small_keeping)
                for _ in range(2):
                    if ", a stream" in name:
                        ids, stats = streamed(decoder, prompts, new, sampling)
                    else:
                        ids, stats = decoded(decoder, prompts, new)
                first = firsts.setdefault(limits, ids)
                kept = not keeps or found(keeping, small_keeping)[0] > before[0]
                differ = sum(a != b for one, other in zip(ids, first) for a, b in zip(one, other))
                other = accepted.setdefault(name.removesuffix(", whole rounds"), stats.accepted)
                wrong = (
                    differ or not kept or abs(other - stats.accepted) > max(1, other / 20)
                )  # a tie may fall otherwise
                more: dict[str, Any] = {"accepted": stats.accepted} | ({"failed": True} if wrong else {})
                said = (
                    f"; {stats.accepted} were accepted, and {other} in the first row of this draft"
                    if how
                    else ""
                ) + ("" if kept else "; no prompt was found")
                stage.row(
                    case,
                    differ=differ,
                    bar="texts",
                    note=f"{differ} tokens differ from plain decoding without graphs{said}",
                    **more,
                )
            for name, one in named.items():
                if one.steps is not None and (one.steps.why or one.steps.failed or one.steps.too_large):
                    stage.row(f"captured steps of {name}, {case}", bar="texts", **stopped(one))
                    broken.add(name)
        for name, one in named.items():
            if one.steps is not None and late and not captured(one):
                stage.skip(f"captured steps of {name}", "not run: the time was up")
            elif one.steps is not None and name not in broken:
                why = stopped(one)
                stage.row(f"captured steps of {name}", **why, **({"bar": "texts"} if why else {}))
                one.steps.release()
