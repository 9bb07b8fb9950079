"""Stage d of the GPU suite: SPIRe's experiment at the paper's shapes (arXiv 2504.06419), each step for its share of the time.

The text is the Python source on this machine, without the packages of the held-out prompts. The 67 M target is trained, then its
drafts: vanilla (an eighth of the target), the same distilled, and SPIRe. τ is exact on texts sampled from the target after held-out
contexts; each small draft is also evaluated under SPIRe's window, a control that the paper lacks. The grid is that of ``lab.grid``,
beside the throughput model with this machine's constants. It is measured twice: first under ``executors.Ahead``, where Python's launches
do not count, then under ``Serial``. Each has a plain round, a fit and rows of its own.
"""

from __future__ import annotations

import copy
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from recipes.gpu.stage import Part, Stage
from specdec.cost import paper
from specdec.data.corpus import DOMAINS, HELD_OUT
from specdec.data.extract import clean
from specdec.data.tokens import write_stream
from specdec.drafts.spire import SpireModel
from specdec.lab import tau
from specdec.lab.bootstrap import Clusters, figures
from specdec.lab.grid import Grid, GridSettings
from specdec.lab.methods import Methods
from specdec.lab.pretraining import Pretraining, Sizes
from specdec.lab.variants import Variant, started, variants
from specdec.training.forward import Parallel
from specdec.training.train import Settings as Training
from specdec.training.train import train

TARGET = "paper-target"
DRAFTS = ("vanilla", "distilled_vanilla", "spire")
WINDOW, SINKS, K = 64, 1, 4
LOADING, POINT = 5.0, 15.0  # the most seconds until the models of a grid are loaded, and of one of its points
LEAST = 2.0  # the least seconds of a point's measurements


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        study = Study(stage, Path(folder))
        stage.parts(
            {
                "text": Part(0.1, study.text),
                "target": Part(0.25, study.train_target),
                "drafts": Part(0.15, study.train_drafts),
                "tau": Part(0.1, study.tau),
                "grid, ahead": Part(0.27, partial(study.grid, executor="ahead")),
                "grid, serial": Part(0.13, partial(study.grid, executor="serial")),
            }
        )


class Study:
    """Models and data of a run, kept in ``folder``; a step raises an error if an earlier one did not make its inputs."""

    def __init__(self, stage: Stage, folder: Path):
        self.folder, self.drafts = folder, dict[str, Any]()
        self.target: Any = None
        self.tokenizer: Any = None
        self.shape = Sizes(64, 2, 2, 96, 32) if stage.toy else Sizes(512, 8, 8, 4096, 128)
        self.s = Pretraining(
            work=str(folder / "work"), vocabulary=512 if stage.toy else 16_384, mixture=(1.0, 0.0, 0.0),
            tokenizer_megabytes=0.2 if stage.toy else 16.0, length=64 if stage.toy else 1024,
            micro_batch=2 if stage.toy else 16, batch=2 if stage.toy else 32, attention="sdpa", compile=False,
            checkpoint_minutes=1e9, seed=stage.seed,
        )  # fmt: skip

    # -- text ---------------------------------------------------------------------------------------------------------------

    def text(self, stage: Stage) -> None:
        """A tokenizer and token streams, in the folders of ``Streams``."""
        megabytes = 0.3 if stage.toy else 120.0
        # Reading ends early enough to leave time for the tokens.
        seconds = 60.0 if stage.toy else max(2.0, 0.3 * (stage.deadline - monotonic()))
        texts = list(sources(megabytes, stage.seed, not stage.toy, seconds))
        held, rest = texts[: max(2, len(texts) // 50)], texts[max(2, len(texts) // 50) :]
        Path(self.s.work, "shards").mkdir(parents=True)
        self.tokenizer = self.s.tokenizer(dict.fromkeys(DOMAINS, rest))
        for split, some in (("train", rest), ("validation", held)):
            for domain in DOMAINS:  # all text is code: the mixture's other domains are empty
                part = some if domain == "code" else some[:40]
                write_stream(self.s.path(split, domain), self.tokenizer, part)
        size = sum(map(len, rest)) / 1e6
        stage.row(
            "text",
            monotonic() - stage.began,
            note=f"{len(rest)} files, {size:.1f} MB, {self.s.vocabulary} tokens",
        )

    # -- training -------------------------------------------------------------------------------------------------------------

    def train_target(self, stage: Stage) -> None:
        if self.tokenizer is None:
            raise RuntimeError("there is no text to train on")
        seconds = 1.0 if stage.toy else max(10.0, stage.deadline - monotonic() - 8)
        model, seen = self.s.train(TARGET, self.shape, seconds / 60)
        model.config.max_position_embeddings = 8192  # rotary positions need no table
        model.save_pretrained(self.folder / "target")
        self.tokenizer.save_pretrained(self.folder / "target")
        loaded = AutoModelForCausalLM.from_pretrained(self.folder / "target", dtype=torch.float32)
        self.target = loaded.to(stage.device).eval()
        body = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
        last = seen["curve"][-1] if seen["curve"] else {}
        stage.row(
            "target", 60 * seen["minutes"], tokens=seen["tokens"], loss=last.get("code"),
            note=f"{body / 1e6:.0f} M parameters without embedding, {seen['tokens'] / 1e6:.1f} M tokens, "
            f"validation loss {last.get('code', float('nan')):.2f}",
        )  # fmt: skip

    def train_drafts(self, stage: Stage) -> None:
        if self.target is None:
            raise RuntimeError("there is no target to draft for")
        chosen, end = self.variants(), stage.deadline
        count = 16 if stage.toy else 8192
        data = self.s.batches("train").take(count)
        for i, name in enumerate(DRAFTS):
            with stage.case(name):
                left = (end - monotonic()) / (len(DRAFTS) - i)
                batch = self.s.micro_batch
                paced = started(chosen[name], self.target, stage.seed)
                steps = 2 if stage.toy else 10
                before = self._train(chosen[name], copy.deepcopy(paced), data, Training(2, batch)).seconds
                before = self._train(chosen[name], copy.deepcopy(paced), data, Training(steps, batch)).seconds
                pace = before / steps
                steps = 2 if stage.toy else max(20, int((left - 22 * pace - 3) / pace))
                settings = Training(steps, batch, 0.02, 0.006, decay=0.8, seed=stage.seed)
                report = self._train(chosen[name], paced, data, settings)
                self.drafts[name] = paced.to(stage.device).eval()
                stage.row(f"draft {name}", report.seconds, tokens=report.tokens,
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
        """The drafts of the ablations, with the paper's shape for the small draft."""
        every = variants(2, SINKS, WINDOW, K)
        small = paper.VANILLA_DRAFT
        sizes = (small.d_model, small.layers, small.heads, small.d_ff, small.d_head)
        if self.shape.hidden < small.d_model:
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

    def tau(self, stage: Stage) -> None:
        if not self.drafts:
            raise RuntimeError("there are no drafts")
        context, new, prompts = (24, 6, 3) if stage.toy else (512, 64, None)
        depth = self.target.config.num_hidden_layers
        texts = tau.sample(
            self.target,
            self.tokenizer,
            context,
            new,
            K,
            range(depth),
            stage.seed,
            1 if stage.toy else 2,
            prompts,
        )
        whole = SpireModel.from_target(self.target, depth, sinks=SINKS, window=WINDOW, feedback=False)
        scores = {"magicdec": tau.score(whole.to(stage.device).eval(), texts)}
        for name, draft in self.drafts.items():
            if isinstance(draft, SpireModel):
                scores[name] = tau.score(draft, texts)
            else:
                scores[name] = tau.score(draft, texts, Parallel())
                scores[f"windowed_{name}"] = tau.score(draft, texts, Parallel(WINDOW, SINKS))
        for name, made in scores.items():
            sums = torch.stack(made[:2]).numpy()
            found = figures(sums, sums, Clusters(texts.prompt))
            mean, low, high = (found[figure] for figure in ("tau", "tau_low", "tau_high"))
            ends = "" if low is None else f" [{low:.3f}, {high:.3f}]"
            stage.row(
                f"tau at {context}, k = {K}: {name}", tau=mean, low=low, high=high, note=f"{mean:.3f}{ends}"
            )

    # -- grid -------------------------------------------------------------------------------------------------------------------

    def grid(self, stage: Stage, executor: Literal["serial", "ahead"]) -> None:
        """Multipliers of all methods that an executor runs over plain decoding under it, measured and modelled."""
        if not {"vanilla", "spire"} <= self.drafts.keys():
            raise RuntimeError("there is no vanilla or no SPIRe draft")
        if stage.late(f"grid, {executor}", 0.0 if stage.toy else LOADING + POINT):
            return
        for name in self.drafts:
            self.drafts[name].cpu().save_pretrained(self.folder / name)
            self.tokenizer.save_pretrained(self.folder / name)
        batches, contexts = (16, 64, 128), (512, 4096)
        first = ((64, 512), (64, 4096), (16, 4096), (128, 512))
        if stage.toy:
            batches, contexts, first = (1, 2), (24, 40), ((2, 24), (2, 40), (1, 24), (1, 40))  # type: ignore[assignment]
        other, toy = "distilled_vanilla", stage.toy
        settings = GridSettings(
            target=str(self.folder / "target"), draft=str(self.folder / "vanilla"), spire=str(self.folder / "spire"),
            distilled=str(self.folder / other) if other in self.drafts else "", batches=batches, contexts=contexts,
            lengths=(K,), new_tokens=5 if toy else 20, repeats=1 if toy else 3, device=str(stage.device),
            dtype="float32" if toy else "bfloat16", seed=stage.seed, joined=True,
            graphs="eager" if stage.device.type == "cpu" else "auto", executor=executor,
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        try:
            methods = Methods(settings)
            left = stage.deadline - monotonic() - (0 if toy else POINT)
            Grid(replace(settings, seconds=left), methods, first, replayed=True, least=LEAST).measure(
                lambda found: rows.__setitem__(slice(None), found)
            )
        finally:  # report the rows measured before an error, too
            self._grid_rows(stage, executor, rows)
            done = {(r["batch"], r["context"]) for r in rows if r["part"] == "grid"}
            for batch, context in sorted(set(settings.points) - done):
                stage.skip(
                    f"grid, {batch} x {context}, {executor}",
                    "not run: its share of the time was used up, or an error came first",
                )

    @staticmethod
    def _grid_rows(stage: Stage, executor: str, rows: list[dict[str, Any]]) -> None:
        for r in (r for r in rows if r["part"] == "left_out"):
            stage.row(f"{r['method']}, {executor}", executor=executor, note=f"left out: {r['why']}")
        for r in (r for r in rows if r["part"] == "bare"):
            what = f"{r['method']}{' draft' if r['method'] != 'target' else ''}, {r['tokens']} tokens a row"
            note = {"note": "of its captured chain"} if r.get("replayed") else {}
            stage.row(f"bare step, {what}, {r['batch']} x {r['context']}, grid {executor}", r["seconds"],
                    modelled_seconds=r["modelled_seconds"], replayed=bool(note), **note)  # fmt: skip
        found = {(r["batch"], r["context"], r["method"]): r for r in rows if r["part"] == "grid"}
        for (batch, context, method), r in found.items():
            modelled = r["modelled"]
            stage.row(
                f"{method}, {batch} x {context}, {executor}", r["round_seconds"], multiplier=r["multiplier"], modelled=modelled,
                tau=r["tau"], fitted=r["fitted"], executor=r["executor"],
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
            stage.row(f"spire over others, {batch} x {context}, {executor}", executor=r["executor"],
                    **{f"over_{m}": v for m, v in over.items()}, note=", ".join(f"{m} {v:.2f}" for m, v in over.items()))  # fmt: skip


def sources(megabytes: float, seed: int, everything: bool, seconds: float) -> Iterator[str]:
    """Python files of this installation in random order, without the packages of the held-out prompts.

    Args:
        everything: include installed packages, not just the top level of the standard library. seconds: for reading, after which it
            stops as soon as there are 8 megabytes.
    """
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    files = sorted(library.glob("*.py"))
    if everything:
        files = sorted({*library.rglob("*.py"), *Path(paths["purelib"]).rglob("*.py")})
    held = {name.removeprefix("stdlib.") for names in HELD_OUT.values() for name in names}
    held |= {"pdfminer", "yaml"}  # by the names of their folders
    random.Random(seed).shuffle(files)
    left, until = megabytes * 1e6, monotonic() + seconds
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
            if left < 0 or (monotonic() > until and left < (megabytes - 8) * 1e6):
                return
