"""Losses against their definitions, cached states against the target, and one call that trains, stops, resumes and says no."""

from __future__ import annotations

import copy
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tiny import tiny

import specdec as sd
from specdec.drafts import Spire
from specdec.drafts.spire import SpireModel
from specdec.training.forward import KPass, Parallel
from specdec.training.losses import HardLoss, MixedLoss, acceptance, cross_entropy, distillation
from specdec.training.passes import k_pass
from specdec.training.states import States, target_states
from specdec.training.train import Settings, train


def hashed(model):
    digest = hashlib.sha256(str(model.config.to_dict()).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def text(rows=12, length=17, seed=0):
    """Sequences with something to learn: each token follows from the one before, mostly."""
    draw = torch.Generator().manual_seed(seed)
    step = torch.where(torch.rand(rows, length, generator=draw) < 0.9, 3, 11)
    return (torch.randint(0, 97, (rows, 1), generator=draw) + step.cumsum(1)) % 97


def test_losses_by_hand():
    q, p = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.3, 0.5]]).log()
    assert float(acceptance(q, p)) == pytest.approx(0.2 + 0.3 + 0.2)
    expected = -(
        0.2 * torch.tensor(0.5).log() + 0.3 * torch.tensor(0.3).log() + 0.5 * torch.tensor(0.2).log()
    )
    assert float(distillation(q, p)) == pytest.approx(float(expected))
    token = torch.tensor([1])
    assert float(cross_entropy(q, token)) == pytest.approx(-float(torch.tensor(0.3).log()))
    for weight in (0.0, 0.5, 1.0):
        mixed = weight * float(expected) - (1 - weight) * 0.7
        assert float(MixedLoss(weight)(q, p, token)) == pytest.approx(mixed)
    assert float(HardLoss()(q, p, token)) == pytest.approx(float(cross_entropy(q, token)))
    with pytest.raises(ValueError, match=r"weight is 1\.5"):
        MixedLoss(1.5)


def test_acceptance_is_what_the_verifier_does():
    draw = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 6, generator=draw).softmax(-1)
    kept = sum(float(q[v]) * min(1.0, float(p[v] / q[v])) for v in range(6))
    assert float(acceptance(q.log(), p.log())) == pytest.approx(kept)


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_parallel_forward_is_the_models_own_under_the_mask(family, window, sinks):
    model = tiny(family, seed=3)
    tokens = torch.randint(0, 97, (2, 150), generator=torch.Generator().manual_seed(1))
    q, k = torch.arange(149)[:, None], torch.arange(149)
    seen = k <= q
    if window is not None:
        seen &= (k > q - window) | (k < sinks)
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    expected = model(tokens[:, :-1], attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits
    batch = target_states(model, tokens, [])
    said = model.generate(tokens[:, :9], max_new_tokens=5, do_sample=False)
    torch.testing.assert_close(Parallel(window, sinks)(model, batch), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(tokens[:, :9], max_new_tokens=5, do_sample=False), said)


def test_states_are_the_targets_and_continue(tmp_path):
    target, tokens = tiny("llama", num_hidden_layers=3).float(), text()
    whole = States.write(tmp_path / "a", target, tokens.split(5), [1, 2], progress=False)
    batch = whole.take([3, 0])
    with torch.no_grad():
        out = target(tokens[[3, 0], :-1], output_hidden_states=True)
    assert torch.equal(batch.tokens, tokens[[3, 0]])
    for layer in (1, 2):
        assert torch.equal(batch.inputs[layer], out.hidden_states[layer].bfloat16())
    logits = target.lm_head(batch.final.float())
    torch.testing.assert_close(logits, out.logits, rtol=0.05, atol=0.05)

    class Interrupted(Exception):
        pass

    def stops():
        yield tokens[:5]
        raise Interrupted

    with pytest.raises(Interrupted):
        States.write(tmp_path / "b", target, stops(), [1, 2], progress=False)
    with open(tmp_path / "b" / "tokens.bin", "ab") as file:
        file.write(b"half a sequence")
    again = States.write(tmp_path / "b", target, tokens.split(2), [1, 2], progress=False)
    assert len(again) == len(whole) == 12
    assert (again.tokens == whole.tokens).all()
    # Another batch size rounds otherwise.
    assert abs(again.activations.astype(int) - whole.activations).max() <= 1
    with pytest.raises(ValueError, match="holds states of target"):
        States(tmp_path / "a", tiny("llama", seed=5, num_hidden_layers=3))
    with pytest.raises(ValueError, match="keeps layers"):
        States.write(tmp_path / "a", target, [tokens], [0], progress=False)
    with pytest.raises(FileNotFoundError, match=r"States\.write"):
        States(tmp_path / "nothing")


def test_states_that_two_processes_write_are_refused(tmp_path):
    target = tiny("llama")

    def another():
        yield torch.arange(18).view(2, 9)
        with open(tmp_path / "activations.bin", "ab") as file:
            file.write(b"theirs")
        yield torch.arange(18).view(2, 9)

    with pytest.raises(RuntimeError, match="written to by another process"):
        States.write(tmp_path, target, another(), [0], progress=False)


@pytest.mark.parametrize("kind", ["spire", pytest.param("model", marks=pytest.mark.slow)])
def test_training_raises_acceptance_and_leaves_the_target(kind, tmp_path):
    target, tokens = tiny("llama", num_hidden_layers=3).float(), text(24)
    before = hashed(target)
    if kind == "spire":
        draft = SpireModel.from_target(target, 1, window=8)
        states = States.write(tmp_path / "s", target, tokens.split(8), draft.layers, progress=False)
    else:
        draft, states = tiny("llama", seed=9).float(), tokens
    assert hashed(target) == before
    settings = Settings(
        steps=40, batch=8, muon_lr=0.02, adam_lr=0.01, validate_every=40, precision=torch.float32
    )
    start = train(
        copy.deepcopy(draft),
        target,
        states,
        settings=Settings(steps=1, muon_lr=0, adam_lr=0),
        validation=states,
        progress=False,
    )
    made = train(draft, target, states, settings=settings, validation=states, progress=False)
    assert made.tokens == 40 * 8 * 16
    assert made.curve[-1]["acceptance"] > start.curve[-1]["acceptance"] + 0.05
    assert made.curve[-1]["tau"] > start.curve[-1]["tau"]
    assert hashed(target) == before
    assert all(p.dtype == torch.float32 for p in draft.parameters())
    fresh = SpireModel.from_target(target, 1, window=8) if kind == "spire" else tiny("llama", seed=9).float()
    for (name, mine), (_, theirs) in zip(draft.named_buffers(), fresh.named_buffers()):
        assert torch.equal(mine, theirs), name  # rotary frequencies are not rounded on the way


def test_a_run_that_its_user_ends_keeps_its_last_step(tmp_path, monkeypatch):
    """Ctrl-C, long before a checkpoint is due; in the middle of an update nothing is kept."""
    target, tokens = tiny("llama", num_hidden_layers=3).float(), text()
    settings = Settings(steps=6, batch=4)

    def draft():
        return SpireModel.from_target(target, 1, window=8)

    def ended(row):
        if row["step"] == 4:
            raise KeyboardInterrupt

    whole, path = draft(), tmp_path / "c.pt"
    uncut = train(whole, target, tokens, settings=settings, progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(draft(), target, tokens, settings=settings, checkpoint=path, on_step=ended, progress=False)
    part, steps = draft(), []
    report = train(
        part, target, tokens, settings=settings, checkpoint=path, on_step=steps.append, progress=False
    )
    assert [row["step"] for row in steps] == [5, 6]
    assert (report.tokens, report.curve[-1]["loss"]) == (uncut.tokens, uncut.curve[-1]["loss"])
    for mine, theirs in zip(part.parameters(), whole.parameters()):
        assert torch.equal(mine, theirs)

    def broken(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.training.weights.Weights.update", broken)
    with pytest.raises(KeyboardInterrupt):
        train(draft(), target, tokens, settings=settings, checkpoint=tmp_path / "d.pt", progress=False)
    assert not (tmp_path / "d.pt").exists()


def test_an_interrupted_run_ends_as_a_whole_one(tmp_path):
    target, tokens = tiny("llama", num_hidden_layers=3).float(), text()
    settings = Settings(steps=8, batch=4, checkpoint_minutes=0)

    def draft():
        return SpireModel.from_target(target, 1, window=8)

    whole = draft()
    uncut = train(whole, target, tokens, settings=settings, progress=False)

    class Stop(Exception):
        pass

    def stop(row):
        if row["step"] == 5:
            raise Stop

    import dataclasses

    path, part = tmp_path / "c.pt", draft()
    each = dataclasses.replace(settings, validate_every=1)
    with pytest.raises(Stop):
        train(part, target, tokens, settings=each, checkpoint=path, on_validation=stop, progress=False)
    part = draft()
    report = train(part, target, tokens, settings=each, checkpoint=path, progress=False)
    assert report.tokens == 8 * 4 * 16
    assert report.curve[-1]["loss"] == pytest.approx(uncut.curve[-1]["loss"], rel=1e-5)
    for mine, theirs in zip(part.parameters(), whole.parameters()):
        assert torch.equal(mine, theirs)
    longer = dataclasses.replace(each, steps=10)
    report = train(part, target, tokens, settings=longer, checkpoint=path, progress=False)  # trained on
    assert (report.tokens, report.curve[-1]["step"]) == (10 * 4 * 16, 10)
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(part.parameters(), whole.parameters()))
    with pytest.raises(ValueError, match="was made with steps = 10, and it is 8 now"):
        train(draft(), target, tokens, settings=each, checkpoint=path, progress=False)
    each = longer
    other = SpireModel.from_target(target, 1, window=9)
    with pytest.raises(ValueError, match="is of another run: its draft"):
        train(other, target, tokens, settings=each, checkpoint=path, progress=False)
    with pytest.raises(ValueError, match="is of another run: its loss"):
        train(draft(), target, tokens, loss=HardLoss(), settings=each, checkpoint=path, progress=False)
    with pytest.raises(ValueError, match="muon_lr"):
        train(
            draft(),
            target,
            tokens,
            settings=dataclasses.replace(each, muon_lr=1.0),
            checkpoint=path,
            progress=False,
        )


def test_models_stay_on_their_devices():
    """The draft is moved and moved back, without the weights that it shares with its target."""
    target, draft = tiny("llama", num_hidden_layers=2), tiny("llama", seed=4)
    table, to, moves = target.get_input_embeddings().weight.requires_grad_(False), draft.to, []
    draft.set_input_embeddings(target.get_input_embeddings())

    def noted(device):
        moves.append((device, {id(p) for p in draft.parameters()}))
        return to(device)

    draft.to = noted
    settings = Settings(1, 4, precision=torch.float32)
    train(draft, target, text(), settings=settings, accelerator=Accelerator(cpu=True), progress=False)
    (there, moved), (back, _) = moves
    assert there == back == torch.device("cpu")
    assert id(table) not in moved
    assert draft.get_input_embeddings().weight is table


def test_a_draft_that_is_the_target_is_refused():
    target = tiny("llama", num_hidden_layers=2).float()
    with pytest.raises(
        ValueError, match=r"draft has the target's own '.*', which training would change: give a copy"
    ):
        train(target, target, text(), settings=Settings(steps=1), progress=False)


def test_saved_and_loaded(tmp_path):
    target = tiny("qwen3", num_hidden_layers=3)
    draft = SpireModel.from_target(target, [0, 2], sinks=2, window=9)
    torch.nn.init.normal_(draft.memory.weights)
    draft.save_pretrained(tmp_path)
    again = SpireModel.from_pretrained(tmp_path, target)
    assert (again.layers, again.sinks, again.window, again.target) == ((0, 2), 2, 9, draft.target)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), draft.parameters()))
    assert torch.equal(again.memory.weights, draft.memory.weights)
    with pytest.raises(ValueError, match="fingerprints of the weights"):
        SpireModel.from_pretrained(tmp_path, tiny("qwen3", seed=1, num_hidden_layers=3))
    with pytest.raises(FileNotFoundError, match="from_target"):
        SpireModel.from_pretrained(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (["text"] * 8, ValueError, "data must be States, or .* read texts by the tokenizer"),
        ("text", ValueError, "data must be States"),
        ([[1, 2, 3], [4, 5]], ValueError, "sequences of equally many ids"),
        (torch.ones(4, 9), TypeError, "data holds torch.float32 numbers: give ids"),
        (torch.full((4, 9), 97), ValueError, "data has ids from 97 to 97 and the target a vocabulary of 97"),
        (-torch.ones(4, 9).long(), ValueError, "data has ids from -1 to -1"),
    ],
)
def test_data_that_are_no_ids(data, error, message):
    target = tiny("llama", dtype=torch.float32)
    with pytest.raises(error, match=message):
        train(tiny("llama", 1), target, data, settings=Settings(steps=1), progress=False)
    with pytest.raises(error, match=message.replace("data", "validation", 1)):
        train(tiny("llama", 1), target, text(), validation=data, settings=Settings(steps=1), progress=False)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"muon_lr": -1}, ValueError, "muon_lr is -1: give a number >= 0"),
        ({"adam_lr": float("nan")}, ValueError, "adam_lr is nan"),
        ({"warmup": 0}, ValueError, "warmup is 0: give a number above 0"),
        ({"clip": 0.0}, ValueError, r"clip is 0\.0"),
        ({"steps": 0}, ValueError, "steps is 0: give at least 1"),
        ({"steps": 2.5}, TypeError, r"steps is 2\.5: give a whole number"),
        ({"batch": "4"}, TypeError, "batch is '4'"),
    ],
)
def test_settings_that_make_no_sense(numbers, error, message):
    with pytest.raises(error, match=message):
        Settings(**numbers)


def test_bad_input():
    target, tokens = tiny("llama", num_hidden_layers=3), text()
    for layers, message in ((4, "has 3 blocks"), (0, "has 3 blocks"), ([1, 5], "from 0 to 2")):
        with pytest.raises(ValueError, match=message):
            SpireModel.from_target(target, layers)
    with pytest.raises(ValueError, match="window is 0"):
        SpireModel.from_target(target, window=0)
    with pytest.raises(ValueError, match="sinks is -1"):
        SpireModel.from_target(target, sinks=-1)
    with pytest.raises(ValueError, match="gpt2"):
        SpireModel.from_target(tiny("gpt2"))
    draft = SpireModel.from_target(target, 2, window=3)
    inputs = {layer: torch.zeros(1, 8, 32, dtype=draft.dtype) for layer in draft.layers}
    with pytest.raises(ValueError, match="inputs lacks layer 1"):
        k_pass(draft, tokens[:1, :8], {}, k=2)
    with pytest.raises(ValueError, match="too few for a block"):
        k_pass(draft, tokens[:1, :1], inputs, k=2)
    wide = tiny("llama", num_hidden_layers=3, hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size is 64 and the draft's 32"):
        sd.decoder(sd.HFModel(wide)).draft(Spire(draft)).build()
    with pytest.raises(ValueError, match="was made for target"):
        sd.decoder(sd.HFModel(tiny("llama", seed=4, num_hidden_layers=3))).draft(Spire(draft)).build()
    with pytest.raises(ValueError, match="give an HFModel"):
        sd.decoder(sd.TableModel.random(97)).draft(Spire(draft)).build()
    with pytest.raises(ValueError, match="was made for target"):
        train(draft, tiny("llama", seed=4, num_hidden_layers=3), tokens)
    with pytest.raises(ValueError, match="draft has a vocabulary of 50 and the target one of 97"):
        train(tiny("llama", vocab_size=50), target, tokens)
    with pytest.raises(TypeError, match=r"settings is \{'steps': 3\}: give Settings"):
        train(draft, target, tokens, settings={"steps": 3})
    capped = tiny("gemma2", num_hidden_layers=3, final_logit_softcapping=0.5)
    with pytest.raises(ValueError, match="does more to its logits than its head"):
        train(tiny("llama"), capped, tokens)
    with pytest.raises(ValueError, match="no blocks named 'layers"):
        train(tiny("gpt2"), target, tokens)
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        SpireModel.from_target(tiny("llama", hidden_act="gelu"))
    with pytest.raises(ValueError, match="data must be"):
        train(draft, target, tokens[0])
    two = SpireModel.from_target(target, 2, sinks=4)
    with pytest.raises(
        ValueError, match="prompt 1 has 2 tokens, and draft 'spire' needs 4 at least: give a longer prompt"
    ):
        sd.decoder(sd.HFModel(target)).draft(Spire(two)).build().generate([[1, 2, 3, 4], [1, 2]], 4)
    with pytest.raises(ValueError, match=r"Spire\(model, block=6\)"):
        sd.decoder(sd.HFModel(target)).draft(Spire(two, block=4), 6).build().generate([[1, 2, 3, 4]], 9)


TRAINED_APART = """
import importlib, os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from pathlib import Path
from accelerate import PartialState
getattr(importlib.import_module(sys.argv[3]), sys.argv[4])(Path(sys.argv[2]), os.environ["RANK"])
assert PartialState().num_processes == 2
dist.barrier()
dist.destroy_process_group()
"""


def apart(module, function, folder):
    """Calls ``function(folder / "two", rank)`` of a test module in two CPU processes; returns that folder after an empty one, ``folder / "one"``."""
    (script := folder / "apart.py").write_text(TRAINED_APART)
    (one := folder / "one").mkdir()
    (two := folder / "two").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What a launcher tells its processes; accelerate's own starts one on CPUs, whatever it is asked for.
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(Path(__file__).parent), str(two), module, function],
            env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        said = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)[-3000:]
    return one, two


def trained_with_clipping(folder, rank):
    """Leaves a checkpoint of each run, and the last run's weights."""
    for clip in (0.05, 1e9):
        target = tiny("llama", num_hidden_layers=3)
        draft = SpireModel.from_target(target, 1, window=8)
        settings = Settings(steps=4, batch=4, precision=torch.float64, muon_lr=0, clip=clip)
        train(
            draft, target, text(), settings=settings, progress=False, checkpoint=folder / f"{clip:g}-{rank}"
        )
        torch.save(dict(draft.named_parameters()), folder / f"weights-{rank}")


def test_k_pass_is_the_default_forward():
    target = tiny("llama", num_hidden_layers=3)
    draft = SpireModel.from_target(target, 1)
    batch = target_states(target, text(2), draft.layers)
    with torch.no_grad():
        assert torch.equal(KPass(4)(draft, batch), k_pass(draft, batch.tokens[:, :-1], batch.inputs, 4))
