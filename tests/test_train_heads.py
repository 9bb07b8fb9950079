"""Heads in the trainer: every kind learns, a resumed run is the whole one, and the target is left as it was."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from one_process import each
from test_training import apart, hashed, text
from tiny import tiny

import specdec as sd
from specdec import zoo
from specdec.drafts.heads import DFlash, DSpark, Eagle3, Head
from specdec.training.anchored import layers_of
from specdec.training.anchored import steps as head_steps
from specdec.training.forward import Blocks, KPass, Parallel, drafted
from specdec.training.losses import ABSENT, ByDepth, CombinedLoss, HardLoss, MixedLoss, cross_entropy
from specdec.training.states import States, target_states
from specdec.training.train import Settings, train
from specdec.training.validation import Judge

SMALL = {"blocks": 1, "block_size": 4}
HEADS = {
    "eagle3": (Eagle3, {"own_head": False, "norm_output": True}),
    "eagle3, few ids": (Eagle3, {"vocabulary": range(0, 97, 2)}),
    "dflash": (DFlash, SMALL),
    "dspark": (DSpark, {**SMALL, "rank": 8}),
    "dspark, few ids": (DSpark, {**SMALL, "rank": 8, "own_head": True, "vocabulary": range(0, 97, 2)}),
}


def made(name, target):
    kind, settings = HEADS[name]
    return kind.from_target(target, (1, 2, "final"), **settings)


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=3).float()


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_every_head_learns_and_the_target_stays(name, target, tmp_path):
    before, ends = hashed(target), made(name, target).ends
    head, states = made(name, target), text(24)
    if name == "eagle3":  # recorded with several taps; the others run the target in every step
        states = States.write(tmp_path, target, states.split(8), [0, 1, 2], progress=False)
    rows = []
    parts = CombinedLoss(soft=0.5, variation=0.5)  # 0 for the target's own law
    settings = Settings(40, 8, muon_lr=0.02, adam_lr=0.02, validate_every=20, precision=torch.float32)
    report = train(
        head, target, states, loss=ByDepth(parts), forward=Blocks(3, 6), settings=settings, validation=states,
        progress=False, on_step=rows.append,
    )  # fmt: skip
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert sum(row["loss"] for row in rows[-5:]) / 5 < 0.7 * rows[0]["loss"]
    first, last = report.curve
    assert last["validation_loss"] < first["validation_loss"]
    assert hashed(target) == before
    assert all(p.grad is None for p in target.parameters())
    assert head.ends.table is ends.table
    assert all(p.dtype == torch.float32 and p.requires_grad for p in head.parameters())
    frame = report.frame()
    assert list(frame.tau) == [first["tau"], last["tau"]]
    depths = frame[["acceptance_1", "acceptance_2", "acceptance_3"]].mean(axis=1)
    assert list(depths) == pytest.approx(list(frame.acceptance))
    out = sd.decoder(sd.HFModel(target)).greedy().draft(Head(head), 3).build().generate([[1, 2, 3]], 8)
    assert out.ids == sd.decoder(sd.HFModel(target)).greedy().build().generate([[1, 2, 3]], 8).ids


def test_an_interrupted_run_of_a_head_ends_as_a_whole_one(target, tmp_path):
    class Stop(Exception):
        pass

    def stop(row):
        if row["step"] == 5:
            raise Stop

    for name in ("eagle3", "dspark"):
        settings, path = Settings(8, 4, checkpoint_minutes=0), tmp_path / f"{name}.pt"
        whole, part, again = (made(name, target) for _ in range(3))
        blocks = Blocks(3, 4)  # anchors are drawn anew in every step
        train(whole, target, text(), forward=blocks, settings=settings, progress=False)
        with pytest.raises(Stop):
            train(
                part,
                target,
                text(),
                forward=blocks,
                settings=settings,
                checkpoint=path,
                on_step=stop,
                progress=False,
            )
        assert part.ends.table is whole.ends.table  # a run that fails gives them back, too
        report = train(
            again, target, text(), forward=blocks, settings=settings, checkpoint=path, progress=False
        )
        assert report.tokens == 8 * 4 * 16
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters()))
        assert not all(torch.equal(a, b) for a, b in zip(part.parameters(), whole.parameters()))
        longer = dataclasses.replace(settings, steps=9)
        with pytest.raises(ValueError, match="is of another run: its forward is Blocks"):
            train(
                again, target, text(), forward=Blocks(3, 5), settings=longer, checkpoint=path, progress=False
            )
    other = Eagle3.from_target(target, (0, 2, "final"), own_head=False, norm_output=True)
    with pytest.raises(ValueError, match="is of another run: its draft"):
        train(
            other,
            target,
            text(),
            forward=blocks,
            settings=settings,
            checkpoint=tmp_path / "eagle3.pt",
            progress=False,
        )


def train_apart(folder, rank):
    """Leaves the weights of a run."""
    target = tiny("llama", num_hidden_layers=3)
    head = made("dspark", target)
    train(
        head, target, text(), forward=Blocks(3, 4), progress=False,
        settings=Settings(3, 4, precision=torch.float64, muon_lr=0, clip=0.05),
    )  # fmt: skip
    torch.save(dict(head.named_parameters()), folder / f"weights-{rank}")


@pytest.mark.slow
def test_processes_share_a_batch_of_heads(tmp_path):
    """The anchors of a text are the same whichever process draws them, so that two processes train as one does."""
    one, two = apart("test_train_heads", "train_apart", tmp_path)
    train_apart(one, "0")
    alone, first, second = (torch.load(f) for f in (one / "weights-0", two / "weights-0", two / "weights-1"))
    begun = dict(made("dspark", tiny("llama", num_hidden_layers=3)).named_parameters())
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)
    assert any(not torch.equal(value, begun[name]) for name, value in alone.items())


@pytest.mark.parametrize("name", ["eagle3", "dspark, few ids"])
@torch.no_grad()
def test_the_loss_compares_each_depth_with_the_targets_law_there(name):
    """Against a loop over anchors and depths; p is renormalised on the head's ids, and the probability of acceptance is not."""
    target = tiny("llama", num_hidden_layers=3)
    head, tokens = made(name, target), text(2, 20)
    batch = target_states(target, tokens, [1, 2])
    laws = target(tokens[:, :-1]).logits
    out = Blocks(3, 5)(head, batch)
    assert out.at[0].tolist() == [[a, a + 1, a + 2] for a in range(1, 17, 3)]
    loss = CombinedLoss(0.3, 0.5, 0.7, 0.9 * head.confident)
    found = float(Judge(head, ByDepth(loss, 0.5), head.ends.logits)(out, batch))
    said = list(head_steps(head, tokens, layers_of(head, batch), 3, out.at[..., 0]))
    total = [0.0, 0.0, 0.0]
    for n, (logits, sure, _) in enumerate(said):
        terms, texts = torch.zeros(4, dtype=torch.float64), 0
        for b in range(2):
            for i, a in enumerate(out.at[b, :, 0].tolist()):
                full = laws[b, a + n].softmax(-1)
                p, q = full[head.ids] / full[head.ids].sum(), logits[b, i].softmax(-1)
                token = int(tokens[b, a + 1 + n])
                if token in head.ids.tolist():
                    terms[0] -= q[head.ids.tolist().index(token)].log()
                    texts += 1
                terms[1] += (p * (p / q).log()).sum()
                terms[2] += (p - q).abs().sum() / 2
                if sure is not None:
                    truth, c = full[head.ids].minimum(q).sum(), sure[b, i].sigmoid()
                    terms[3] -= truth * c.log() + (1 - truth) * (1 - c).log()
        count = out.at[..., 0].numel()
        total[n] = 0.3 * terms[0] / texts + (0.5 * terms[1] + 0.7 * terms[2] + 0.9 * terms[3]) / count
    expected = (total[0] + 0.5 * total[1] + 0.25 * total[2]) / 1.75
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_validation_of_blocks_by_hand(target):
    head, tokens = made("eagle3, few ids", target), text(6, 20)
    judge = Judge(head, ByDepth(MixedLoss()), head.ends.logits)
    with torch.no_grad():
        batch = target_states(target, tokens, [1, 2])
        out, laws = Blocks(3)(head, batch), target(tokens[:, :-1]).logits.softmax(-1)
        q = head.widened(out.logits).softmax(-1)
        p = torch.stack([law[at] for law, at in zip(laws, out.at)])
    a = q.minimum(p).sum(-1)
    tau = 1 + float((a[..., 0] + a[..., 0] * a[..., 1] + a.prod(-1)).mean())
    from specdec.training.sources import Live

    live = Live(target, tokens, [1, 2])
    # Batches of 4 and 2.
    said = judge.validate(head, live, Blocks(3, 2), 4, torch.device("cpu"), torch.float32)
    assert said["tau"] == pytest.approx(tau, abs=1e-5)
    for n in range(3):
        assert said[f"acceptance_{n + 1}"] == pytest.approx(float(a[..., n].mean()), abs=1e-5)


def test_losses_by_hand():
    q, p = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.3, 0.5]]).log()
    kl = 0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.2)
    token, sure = torch.tensor([1]), torch.tensor([0.4])
    c = 1 / (1 + math.exp(-0.4))
    parts = [-math.log(0.3), kl, 0.3, -0.7 * math.log(c) - 0.3 * math.log(1 - c)]
    for weights in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0.1, 0, 1.8, 1)):
        loss = CombinedLoss(*weights)
        said = float(loss(q, p, token, sure))
        assert said == pytest.approx(sum(w * part for w, part in zip(weights, parts)), abs=1e-6)
        assert (loss.needs_target, "confidence" in loss.reads) == (any(weights[1:]), bool(weights[3]))
    both = torch.stack([q, q])
    absent = cross_entropy(both, torch.tensor([[1], [ABSENT]]))
    assert float(absent) == pytest.approx(-math.log(0.3))
    assert float(cross_entropy(q, torch.tensor([ABSENT]))) == 0
    assert ByDepth(HardLoss(), 0.5).of(3) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert ByDepth(HardLoss(), (51, 31, 18)).of(2) == pytest.approx([51 / 82, 31 / 82])


def test_other_drafts_have_depths_too():
    """The k passes of SPIRe are blocks of k, an ordinary forward has blocks of one position."""
    from specdec.drafts.spire import SpireModel

    target, tokens = tiny("llama", num_hidden_layers=3), text(2, 18)
    draft = SpireModel.from_target(target, 1)
    batch = target_states(target, tokens, draft.layers)
    with torch.no_grad():
        for forward, model, k in ((KPass(4), draft, 4), (Parallel(), target, 1)):
            flat, out = forward(model, batch), drafted(forward, model, batch, None)
            assert torch.equal(out.logits.flatten(1, 2), flat)
            assert out.logits.shape[2] == k
            assert torch.equal(out.at[0].flatten(), torch.arange(flat.shape[1]))
    report = train(
        draft,
        target,
        tokens,
        loss=ByDepth(MixedLoss()),
        settings=Settings(1, 2),
        validation=tokens,
        progress=False,
    )
    assert [name for name in report.curve[0] if name.startswith("acceptance_")] == [
        f"acceptance_{n}" for n in (1, 2, 3, 4)
    ]


def test_frozen_weights_are_kept_and_trackers_hear(target):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Ear(GeneralTracker):
        name, requires_logging_directory, tracker = "ear", False, None

        def __init__(self):
            super().__init__()
            self.heard = []

        def store_init_configuration(self, values):
            self.heard.append(values)

        def log(self, values, step, **kwargs):
            self.heard.append({**values, "at": step})

    head, ear = Eagle3.from_target(target, (1, 2), own_embedding=True), Ear()
    table = head.embed_tokens.weight.requires_grad_(False)
    before, block = table.clone(), head.layers[0].mlp.up_proj.weight.clone()
    train(
        head, target, text(), settings=Settings(2, 4), validation=text(4), progress=False,
        accelerator=Accelerator(log_with=ear),
    )  # fmt: skip
    assert head.embed_tokens.weight is table
    assert not table.requires_grad
    assert torch.equal(table, before)
    assert not torch.equal(head.layers[0].mlp.up_proj.weight, block)
    assert [(row["at"], row["step"]) for row in ear.heard[1:] if "step" in row] == [(1, 1), (2, 2)]
    assert "validation/acceptance_5" in ear.heard[-1]
    assert ear.heard[0]["steps"] == "2"


def test_a_frozen_weight_of_the_target_can_be_shared():
    """As the message of the refusal advises; the target keeps its precision while it runs in every step."""
    target, draft = tiny("llama", num_hidden_layers=2), tiny("llama", seed=4)
    before, table = hashed(target), target.get_input_embeddings().weight.requires_grad_(False)
    draft.set_input_embeddings(target.get_input_embeddings())
    seen = []
    train(
        draft, target, text(), settings=Settings(2, 4, precision=torch.float32), progress=False,
        on_step=lambda row: seen.append(target.get_input_embeddings().weight.dtype),
    )  # fmt: skip
    assert set(seen) == {torch.float64}
    assert hashed(target) == before
    assert draft.get_input_embeddings().weight is target.get_input_embeddings().weight is table
    assert draft.lm_head.weight.requires_grad


def test_a_pocket_head_loads_by_name(tmp_path, monkeypatch):
    target, tokenizer = zoo.load("pocket-target")
    head = Eagle3.from_target(target, own_head=False).to(torch.bfloat16)
    head.save_pretrained(tmp_path / "pocket-mine")
    tokenizer.save_pretrained(tmp_path / "pocket-mine")
    loaded, _ = zoo.load("pocket-mine", tmp_path)
    assert all(torch.equal(a, b.float()) for a, b in zip(loaded.parameters(), head.parameters()))
    monkeypatch.setattr("specdec.zoo.files.FOLDER", tmp_path)
    assert zoo.names() == ["pocket-mine"]
    decoder = sd.decoder(sd.HFModel(target, tokenizer)).greedy().draft("pocket-mine", 3).build()
    assert len(decoder.generate("def f", 5).ids[0]) == 5
    assert Head("pocket-mine").model.dtype == torch.float32


def test_bad_input(target):
    head, few = made("eagle3", target), Settings(1, 2)
    with pytest.raises(ValueError, match="trains a confidence that this Eagle3 does not have"):
        train(head, target, text(), loss=ByDepth(CombinedLoss(confidence=1)), settings=few)
    with pytest.raises(ValueError, match="too short for blocks of k = 16"):
        train(head, target, text(), forward=Blocks(16), settings=few, progress=False)
    with pytest.raises(ValueError, match="was made for target"):
        train(head, tiny("llama", seed=1, num_hidden_layers=3).float(), text(), settings=few)
    with pytest.raises(ValueError, match="proposes at most 3 tokens"):
        train(made("dflash", target), target, text(), forward=Blocks(4), settings=few, progress=False)
    with pytest.raises(ValueError, match="nothing to train"):
        train(made("dflash", target).requires_grad_(False), target, text(), settings=few, progress=False)
    with pytest.raises(ValueError, match="anchors is 0: give at least 1"):
        Blocks(2, 0)
    with pytest.raises(ValueError, match="all weights of CombinedLoss are 0"):
        CombinedLoss()
    with pytest.raises(ValueError, match="variation is -1"):
        CombinedLoss(variation=-1)
    with pytest.raises(ValueError, match="weights is 0"):
        ByDepth(HardLoss(), 0)
    with pytest.raises(ValueError, match="weights has 2 weights, and the blocks have 3 depths"):
        ByDepth(HardLoss(), (1, 1)).of(3)
    with pytest.raises(ValueError, match="weights by depth need blocks"):
        ByDepth(HardLoss())(torch.zeros(1, 2, 5), None, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="this draft has none"):
        CombinedLoss(confidence=1)(torch.zeros(1, 5), torch.zeros(1, 5), torch.zeros(1).long())


RECIPE = Path(__file__).parents[1] / "recipes" / "train_heads.py"


@pytest.mark.slow
def test_the_recipe_trains_exports_and_continues(streams, tmp_path):
    out = tmp_path / "zoo"
    words = f"--work {streams} --zoo {out} --tokens 0.0021 --batch 1 --validation 1".split()
    words += ["--anchors", "16", "--no-compile"]
    names = ["pocket-eagle3", "pocket-mtp", "pocket-medusa", "pocket-spire-equal"]
    rows = str(tmp_path / "t.json")
    first, again, wrong = each(
        [str(RECIPE), *words, "--json", rows, "--drafts", *names],
        [str(RECIPE), *words, "--drafts", names[0]],
        [str(RECIPE), *words, "--drafts", "pocket-nil"],
    )
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert wrong.returncode == 1
    assert "--drafts pocket-nil: there are pocket-eagle3" in wrong.stderr
    said = json.loads(Path(rows).read_text())["rows"]
    assert {(row["draft"], row["tokens"]) for row in said if row["step"] == 2} == {
        (name, 2048) for name in names
    }
    target = sd.HFModel(*zoo.load("pocket-target"))
    for name, row in zip(names, (next(row for row in said if row["draft"] == name) for name in names)):
        draft, _ = zoo.load(name, out)
        assert row["parameters"] == sum(p.numel() for p in draft.parameters())
        assert (
            f"--drafts {name} --tokens 0.0021 --epochs 1 --anchors 16"
            in (out / name / "README.md").read_text()
        )
    greedy = sd.decoder(target).greedy()
    text = greedy.draft(str(out / names[0]), 3).build().generate("def f", 8).ids
    assert text == greedy.build().generate("def f", 8).ids
