"""SPIRe's draft: training and inference are the same function, and it is the target where it should be."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.arm_policy import Arm
from specdec.drafts.spire import SpireModel
from specdec.drafts.spire.steps import SpireSteps
from specdec.selectors.fixed import Arms, Unlearning
from specdec.training.passes import k_pass
from specdec.types import Context

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def draft_of(target, layers=2, **settings):
    """An untrained draft whose memory weights are not all equal."""
    model = SpireModel.from_target(target, layers, **settings)
    if model.memory is not None:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.memory.weights)
    return model


def inputs_of(target, tokens, layers):
    hidden = target(tokens, output_hidden_states=True).hidden_states
    return {layer: hidden[layer] for layer in layers}


def rolled_out(model, tokens, inputs, k, phase):
    """Step by step with the inference code, teacher-forced: the logits ``[B, n * k, V]`` that ``k_pass`` must give."""
    B, L = tokens.shape
    spire = sd.drafts.Spire(model, block=k)
    outputs = []
    for start in range(phase, L - k + 1, k):
        context = Context.of([row[: start + 1].tolist() for row in tokens], capacity=L)
        ring = spire.ring(B, L)
        if start:
            first = [p for p in range(start) if p < ring.sinks or p > start - 1 - ring.size]
            rows = torch.arange(B).repeat_interleave(len(first))
            positions = torch.tensor(first).repeat(B)
            at, turn = ring.at(rows, positions), model.rotary(positions)
            for i, layer in enumerate(model.layers):
                ring.put(i, at, *model.keys_values(i, inputs[layer][rows, positions], turn))
        step = SpireSteps(model, ring, context, k)
        outputs += [step(n, tokens[:, start + n]) for n in range(k)]
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "plain"])
@pytest.mark.parametrize(("sinks", "window"), [(1, 8), (0, 5), (3, 4), (2, None)])
@torch.no_grad()
def test_training_and_inference_are_the_same_function(family, feedback, sinks, window):
    target = tiny(family, num_hidden_layers=3)
    model = draft_of(target, sinks=sinks, window=window, feedback=feedback)
    tokens = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    inputs = inputs_of(target, tokens, model.layers)
    for k, phase in ((4, 0), (4, 3), (1, 0), (3, 2)):
        parallel = k_pass(model, tokens, inputs, k, phase)
        steps = rolled_out(model, tokens, inputs, k, phase)
        torch.testing.assert_close(parallel, steps, rtol=1e-10, atol=1e-10)
        plain = k_pass(model, tokens, inputs, k, phase, dense=True)
        torch.testing.assert_close(parallel, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_all_layers_and_no_window_are_the_target(family):
    target = tiny(family, num_hidden_layers=3)
    model = draft_of(target, layers=3, sinks=0, window=None, feedback=False)
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = target(tokens).logits
    made = k_pass(model, tokens, inputs_of(target, tokens, model.layers), k=4)
    # transformers' norms compute in float32 even in a float64 model
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "plain"])
@pytest.mark.parametrize("greedy", [True, False])
def test_output_is_the_targets(feedback, greedy):
    target = tiny("llama", num_hidden_layers=3)
    spire = sd.drafts.Spire(draft_of(target, window=6, feedback=feedback))
    base = sd.decoder(sd.HFModel(target)).verifier(sd.Coupled())
    base = base.greedy() if greedy else base.sampling(temperature=0.7)
    prompts = [[1, 2, 3], [4], [5] * 40, [7, 8, 9, 10, 11, 12, 13, 14, 15]]
    budgets = [30, 7, 1, 22]
    plain = base.build().generate(prompts, budgets, seed=3).ids
    for length in (1, 4, 8):
        assert base.draft(spire, length).build().generate(prompts, budgets, seed=3).ids == plain


def test_rows_do_not_depend_on_their_company():
    target = tiny("llama", num_hidden_layers=3)
    decoder = sd.decoder(sd.HFModel(target)).draft(sd.drafts.Spire(draft_of(target, window=6))).build()
    prompts = [[1, 2, 3], [4], [5] * 40]
    together = decoder.generate(prompts, [20, 9, 20], seed=[1, 2, 3])
    for b, prompt in enumerate(prompts):
        alone = decoder.generate([prompt], [20, 9, 20][b], seed=[b + 1])
        assert alone.ids[0] == together.ids[b]
        assert alone.stats.tau == together.row_stats[b].tau


class NowAndThen(Unlearning):
    """Arm 1 drafts for a few tokens of a row's text in every 9."""

    def init(self, arms):
        return Arms(arms)

    def select(self, state, context, capacities, rng):
        return (context.length % 9 < 4).long(), torch.ones(context.batch), state


@torch.no_grad()
@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "now and then"])
def test_what_was_drafted_live_is_what_the_passes_give(pooled):
    """Every node of every round of a ragged batch, rejections included, against k passes over the text as it then stood. In a pool, activations wait
    until they are read."""
    target = tiny("llama", num_hidden_layers=3)
    model = draft_of(target, window=7, sinks=2)
    rounds = []
    prompts = [[1, 2, 3], [4, 5], [5] * 40]
    base = sd.decoder(sd.HFModel(target))
    spire = sd.drafts.Spire(model, block=3)
    if pooled:
        decoder = base.pool({"none": None, "spire": Arm(spire, 3)}, NowAndThen()).build()
    else:
        decoder = base.draft(spire, 3).build()
    out = decoder.generate(prompts, [45, 12, 45], seed=0, on_round=rounds.append)
    compared = 0
    for b, prompt in enumerate(prompts):
        text = torch.tensor([prompt + out.ids[b]])
        inputs = inputs_of(target, text, model.layers)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            if b not in rows or not int(r.proposal.size[rows.index(b)]):
                continue
            i = rows.index(b)
            start, size = int(r.context.length[i]) - 1, int(r.proposal.size[i])
            drafted = torch.cat(
                [text[:, : start + 1], r.proposal.tokens[i][None], torch.zeros(1, 3).long()], 1
            )
            known = {
                layer: torch.nn.functional.pad(x[:, : start + 1], (0, 0, 0, 9))[:, : start + 3]
                for layer, x in inputs.items()
            }
            distribution = k_pass(model, drafted[:, : start + 3], known, 3, start).softmax(-1)[0, :size]
            # the target's norms compute in float32, and its activations differ by that between two shapes
            torch.testing.assert_close(r.proposal.probs[i, :size], distribution, rtol=1e-5, atol=1e-8)
            compared += size
    assert compared > (30 if pooled else 40)


@pytest.mark.parametrize("graphs", [False, "eager"])
@pytest.mark.parametrize("part", ["embed", "rotary", "run", "keys_values", "logits"])
def test_parts_of_a_subclass_are_called(part, graphs):
    """Neither the C kernels nor a captured chain pass them by: they are called in every chain, and not only for what is observed."""
    target, calls, drafting, chains = tiny("llama", 0, torch.float32, hidden_size=64), [], [], []

    def own(self, *args):
        calls.extend(drafting)
        return getattr(SpireModel, part)(self, *args)

    def propose(self, *args):
        drafting.append(part)
        made = sd.drafts.Spire.propose(self, *args)
        drafting.clear()
        chains.extend([part] * bool(made[0].nodes))
        return made

    made = SpireModel.from_target(target, 1)
    model = type("Own", (SpireModel,), {part: own})(made.body, made.layers)
    spire = type("Watched", (sd.drafts.Spire,), {"propose": propose})(model, 3, graphs=graphs)
    decoder = sd.decoder(sd.HFModel(target, graphs=graphs)).draft(spire, 3).greedy().build()
    for _ in range(3):  # the last one replays
        calls.clear()
        chains.clear()
        decoder.generate([[1, 2, 3]], 12, eos_token_id=())
    assert len(calls) >= len(chains) > 2
