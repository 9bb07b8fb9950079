"""Stage d of the GPU suite: SPIRe's shapes (arXiv 2504.06419) in one go, each step for its share of the time.

Text is the Python source that this machine has, but for packages that the held-out prompts are cut from. The 67 M target is trained,
then drafts for it: vanilla (an eighth of it), the same distilled, and SPIRe. τ is exact on texts sampled from the target after
held-out contexts; each small draft is also looked at through SPIRe's window, the control that the paper lacks. The grid is that of
spire_measured.py, beside the throughput model with this machine's constants.
"""

from __future__ import annotations

import copy
import json
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import _tau
import spire_measured
import torch
import train_pocket
from _gpu_lab import Lab, Part
from _variants import Variant, started, variants
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specdec.cost import paper
from specdec.data.corpus import DOMAINS, HELD_OUT
from specdec.data.extract import clean
from specdec.data.tokens import write_stream
from specdec.drafts.spire import SpireModel
from specdec.training.forward import Parallel
from specdec.training.train import Settings as Training
from specdec.training.train import train

TARGET = "paper-target"
DRAFTS = ("vanilla", "distilled_vanilla", "spire")
WINDOW, SINKS, K = 64, 1, 4
POINT = 15.0  # seconds that a point of the grid may take


def run(lab: Lab) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        study = Study(lab, Path(folder))
        lab.parts(
            {
                "text": Part(0.1, study.text),
                "target": Part(0.3, study.train_target),
                "drafts": Part(0.2, study.train_drafts),
                "tau": Part(0.1, study.tau),
                "grid": Part(0.3, study.grid),
            }
        )


class Study:
    """Models and data of a run, kept in ``folder``; a step that needs what an earlier one did not make says so."""

    def __init__(self, lab: Lab, folder: Path):
        self.folder, self.drafts = folder, dict[str, Any]()
        self.target: Any = None
        self.tokenizer: Any = None
        self.shape = (64, 2, 2, 96, 32) if lab.toy else (512, 8, 8, 4096, 128)
        self.s = train_pocket.Settings(
            work=str(folder / "work"), zoo=str(folder), vocabulary=512 if lab.toy else 16_384, mixture="1,0,0",
            length=64 if lab.toy else 1024, micro_batch=2 if lab.toy else 16, batch=2 if lab.toy else 32,
            attention="sdpa", compile=False, checkpoint_minutes=1e9, snapshot_minutes=0, seed=lab.seed,
        )  # fmt: skip
        train_pocket.SHAPES[TARGET] = self.shape

    # -- text ---------------------------------------------------------------------------------------------------------------

    def text(self, lab: Lab) -> None:
        """A tokenizer and streams of tokens where train_pocket.py looks for them."""
        megabytes = 0.3 if lab.toy else 120.0
        texts = list(sources(megabytes, lab.seed, everything=not lab.toy))
        held, rest = texts[: max(2, len(texts) // 50)], texts[max(2, len(texts) // 50) :]
        Path(self.s.work, "shards").mkdir(parents=True)
        self.s.tokenizer_megabytes = 0.2 if lab.toy else 16.0
        self.tokenizer = train_pocket.make_tokenizer(self.s, dict.fromkeys(DOMAINS, rest))
        for split, some in (("train", rest), ("validation", held)):
            for domain in DOMAINS:  # all of it is code: the mixture takes nothing of the others
                part = some if domain == "code" else some[:40]
                write_stream(train_pocket.stream(self.s, split, domain), self.tokenizer, part)
        size = sum(map(len, rest)) / 1e6
        lab.row(
            "text",
            monotonic() - lab.began,
            note=f"{len(rest)} files, {size:.1f} MB, {self.s.vocabulary} tokens",
        )

    # -- training -------------------------------------------------------------------------------------------------------------

    def train_target(self, lab: Lab) -> None:
        if self.tokenizer is None:
            raise RuntimeError("there is no text to train on")
        seconds = 1.0 if lab.toy else max(10.0, lab.deadline - monotonic() - 8)
        model, seen = train_pocket.train(self.s, TARGET, seconds / 60, self.tokenizer)
        model.config.max_position_embeddings = 8192  # positions are rotations: any number of them
        model.save_pretrained(self.folder / "target")
        self.tokenizer.save_pretrained(self.folder / "target")
        loaded = AutoModelForCausalLM.from_pretrained(self.folder / "target", dtype=torch.float32)
        self.target = loaded.to(lab.device).eval()
        body = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
        last = seen["curve"][-1] if seen["curve"] else {}
        lab.row(
            "target", 60 * seen["minutes"], tokens=seen["tokens"], loss=last.get("code"),
            note=f"{body / 1e6:.0f} M parameters without embedding, {seen['tokens'] / 1e6:.1f} M tokens, "
            f"validation loss {last.get('code', float('nan')):.2f}",
        )  # fmt: skip

    def train_drafts(self, lab: Lab) -> None:
        if self.target is None:
            raise RuntimeError("there is no target to draft for")
        chosen, end = self.variants(), lab.deadline
        count = 16 if lab.toy else 8192
        data = train_pocket.batches_of(self.s, "train").take(count)
        for i, name in enumerate(DRAFTS):
            with lab.case(name):
                left = (end - monotonic()) / (len(DRAFTS) - i)
                batch = self.s.micro_batch
                paced = started(chosen[name], self.target, lab.seed)
                steps = 2 if lab.toy else 10
                before = self._train(chosen[name], copy.deepcopy(paced), data, Training(2, batch)).seconds
                before = self._train(chosen[name], copy.deepcopy(paced), data, Training(steps, batch)).seconds
                pace = before / steps
                steps = 2 if lab.toy else max(20, int((left - 22 * pace - 3) / pace))
                settings = Training(steps, batch, 0.02, 0.006, decay=0.8, seed=lab.seed)
                report = self._train(chosen[name], paced, data, settings)
                self.drafts[name] = paced.to(lab.device).eval()
                lab.row(f"draft {name}", report.seconds, tokens=report.tokens,
                        note=f"{steps} steps, {report.tokens / 1e6:.1f} M tokens")  # fmt: skip

    def _train(self, variant: Variant, draft: Any, data: Any, settings: Training) -> Any:
        return train(
            draft,
            self.target,
            data,
            loss=variant.loss,
            forward=variant.forward,
            settings=settings,
            progress=False,
        )

    def variants(self) -> dict[str, Variant]:
        """Those of the ablations, with the paper's shape for the small draft."""
        every = variants(2, SINKS, WINDOW, K)
        small = paper.VANILLA_DRAFT
        sizes = (small.d_model, small.layers, small.heads, small.d_ff, small.d_head)
        if self.shape[0] < small.d_model:
            sizes = (32, 1, 2, 48, 16)

        def make(target: Any) -> Any:
            d_model, layers, heads, d_ff, d_head = sizes
            return LlamaForCausalLM(
                LlamaConfig(**target.config.to_dict() | {
                    "hidden_size": d_model, "num_hidden_layers": layers, "num_attention_heads": heads,
                    "num_key_value_heads": heads, "head_dim": d_head, "intermediate_size": d_ff,
                })
            )  # fmt: skip

        for name in ("vanilla", "distilled_vanilla"):
            every[name] = Variant(make, every[name].forward, every[name].loss, every[name].paper)
        return every

    # -- tau ------------------------------------------------------------------------------------------------------------------

    def tau(self, lab: Lab) -> None:
        if not self.drafts:
            raise RuntimeError("there are no drafts")
        context, new, prompts = (24, 6, 3) if lab.toy else (512, 64, None)
        depth = self.target.config.num_hidden_layers
        texts = _tau.sample(
            self.target, self.tokenizer, context, new, K, range(depth), lab.seed, 1 if lab.toy else 2, prompts
        )
        whole = SpireModel.from_target(self.target, depth, sinks=SINKS, window=WINDOW, feedback=False)
        scores = {"magicdec": _tau.score(whole.to(lab.device).eval(), texts)}
        for name, draft in self.drafts.items():
            if isinstance(draft, SpireModel):
                scores[name] = _tau.score(draft, texts)
            else:
                scores[name] = _tau.score(draft, texts, Parallel())
                scores[f"windowed_{name}"] = _tau.score(draft, texts, Parallel(WINDOW, SINKS))
        for row in _tau.rows_of(scores, texts, domains=False):
            lab.row(f"tau at {context}, k = {K}: {row['method']}", **{n: row[n] for n in ("tau", "low", "high")},
                    note=f"{row['tau']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")  # fmt: skip

    # -- grid -------------------------------------------------------------------------------------------------------------------

    def grid(self, lab: Lab) -> None:
        """Multipliers of all methods over plain decoding, measured and modelled."""
        if not {"vanilla", "spire"} <= self.drafts.keys():
            raise RuntimeError("there is no vanilla or no SPIRe draft")
        if lab.late("grid", 0.0 if lab.toy else 30.0):
            return
        for name in self.drafts:
            self.drafts[name].cpu().save_pretrained(self.folder / name)
            self.tokenizer.save_pretrained(self.folder / name)
        file, other = self.folder / "grid.json", "distilled_vanilla"
        batches, contexts, first = (
            (1, 64, 128),
            (128, 512, 4096),
            ((64, 512), (64, 4096), (1, 512), (1, 4096)),
        )
        if lab.toy:
            batches, contexts, first = (1, 2), (24, 40), ((2, 24), (2, 40), (1, 24), (1, 40))
        try:
            spire_measured.main(
                spire_measured.Settings(
                    target=str(self.folder / "target"), draft=str(self.folder / "vanilla"),
                    distilled=str(self.folder / other) if other in self.drafts else "",
                    spire=str(self.folder / "spire"), batches=batches, contexts=contexts, lengths=(K,),
                    new_tokens=5 if lab.toy else 20, repeats=1 if lab.toy else 3, first=first, replayed=True, device=str(lab.device),
                    dtype="float32" if lab.toy else "bfloat16", seed=lab.seed, joined=True, json=str(file),
                    graphs="eager" if lab.device.type == "cpu" else "auto",
                    seconds=lab.deadline - monotonic() - (0 if lab.toy else POINT),
                )
            )  # fmt: skip
        finally:  # what was measured before an error is told, too
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
            self._grid_rows(lab, rows)
            done = {(r["batch"], r["context"]) for r in rows if r["part"] == "grid"}
            for batch, context in sorted(set(product(batches, contexts)) - done):
                lab.skip(
                    f"grid, {batch} x {context}",
                    "not run: its share of the time was used up, or an error came first",
                )

    @staticmethod
    def _grid_rows(lab: Lab, rows: list[dict[str, Any]]) -> None:
        for r in (r for r in rows if r["part"] == "bare"):
            what = f"{r['method']}{' draft' if r['method'] != 'target' else ''}, {r['tokens']} tokens a row"
            note = {"note": "of its captured chain"} if r.get("replayed") else {}
            lab.row(f"bare step, {what}, {r['batch']} x {r['context']}", r["seconds"],
                    modelled_seconds=r["modelled_seconds"], replayed=bool(note), **note)  # fmt: skip
        found = {(r["batch"], r["context"], r["method"]): r for r in rows if r["part"] == "grid"}
        for (batch, context, method), r in found.items():
            modelled = r["modelled"]
            lab.row(
                f"{method}, {batch} x {context}", r["round_seconds"], multiplier=r["multiplier"], modelled=modelled,
                tau=r["tau"], fitted=r["fitted"],
                note=f"multiplier {r['multiplier']:.2f}, modelled {'-' if modelled is None else f'{modelled:.2f}'}, "
                f"tau {r['tau']:.2f}",
            )  # fmt: skip
        for (batch, context, method), r in found.items():
            if method != "spire":
                continue
            over = {
                m: r["multiplier"] / found[batch, context, m]["multiplier"]
                for m in ("vanilla", "windowed", "distilled_vanilla", "magicdec")
                if (batch, context, m) in found
            }
            lab.row(f"spire over others, {batch} x {context}", **{f"over_{m}": v for m, v in over.items()},
                    note=", ".join(f"{m} {v:.2f}" for m, v in over.items()))  # fmt: skip


def sources(megabytes: float, seed: int, everything: bool) -> Iterator[str]:
    """Python files of this installation, in a random order, but those of packages that prompts are cut from.

    Args:
        everything: installed packages, too, not the top of the standard library alone.
    """
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    files = sorted(library.glob("*.py"))
    if everything:
        files = sorted({*library.rglob("*.py"), *Path(paths["purelib"]).rglob("*.py")})
    held = {name.removeprefix("stdlib.") for names in HELD_OUT.values() for name in names}
    held |= {"pdfminer", "yaml"}  # by the names of their folders
    random.Random(seed).shuffle(files)
    left = megabytes * 1e6
    for file in files:
        if held & {*file.parts, file.stem}:
            continue
        try:
            text = clean(file.read_bytes())
        except OSError:
            continue
        if text is not None:
            yield text
            left -= len(text)
            if left < 0:
                return
