"""SPIRe's modelled throughput: every figure of the paper (arXiv 2504.06419), also under other assumptions.

Nothing is measured: FLOPs and bytes of each step are counted and divided by a machine's peak rates (docs/cost.md).
multiplier = throughput over plain decoding's = tau / (k draft steps + 1 verify step, in plain steps). tau is the paper's, k = 4.

fig1 B = 64 over contexts; fig3 operational intensity; fig4 multipliers over batch and context; fig5 ablations at (64, 512); fig6
Llama 3 70B; growing: a generation of --new-tokens that ends at each context; growing_llama: the same of
Llama 3 70B; l_crit: the smallest power of two from which SPIRe's multiplier grows with the batch, up to 128, for both shapes; not_overlapped: compute and memory one after the other; full_terms: with
(un)embedding, attention, KV writes and KV refresh; cost: units of the target's training. Takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import checkout  # noqa: F401

from specdec.cost import H100_PAPER, Hardware, Investment, Load, Method, Shape, paper, training_share
from specdec.cost.growth import critical_context, growing
from specdec.lab import plots
from specdec.lab.options import option, parse
from specdec.lab.recipe import WithPlots


@dataclass(frozen=True)
class Settings(WithPlots):
    tau_context: int = option(
        512, "take tau as measured at this context: 256, 512 or 960 (default: 512, the paper's choice)"
    )
    vocab: int = option(paper.VOCAB, "of full_terms")
    new_tokens: int = option(64, "of growing, the paper's number of sampled tokens")


BATCHES = tuple(2**i for i in range(8))  # 1 ... 128
CONTEXTS = tuple(2**i for i in range(3, 14))  # 8 ... 8192
LONG_CONTEXTS = tuple(2**i for i in range(10, 21))  # 1024 ... 1048576
INTENSITY_BATCHES = tuple(2**i for i in range(11))  # 1 ... 1024
INTENSITY_CONTEXTS = (32, 128, 512, 2048, 8192)
AT = (64, 512)  # batch and context of the ablations and of the headline

Row = dict[str, Any]


def main(s: Settings) -> None:
    s.begin()
    rows = figures(s)
    report(rows)
    s.save(rows)
    s.draw(drawings(rows))


def figures(s: Settings) -> list[Row]:
    """The rows of all figures."""
    if s.tau_context not in paper.TAU:
        raise SystemExit(
            f"tau was measured at contexts {sorted(paper.TAU)}, not at --tau-context {s.tau_context}"
        )
    if s.vocab < 1 or not 1 <= s.new_tokens < AT[1]:
        raise SystemExit(
            f"--vocab {s.vocab} and --new-tokens {s.new_tokens}: give at least 1, and fewer than {AT[1]} new tokens, which end there"
        )
    tau, hardware = paper.TAU[s.tau_context], H100_PAPER
    target, methods = paper.TARGET, paper.METHODS
    with_vocab = {name: replace(m, draft=replace(m.draft, vocab=s.vocab)) for name, m in methods.items()}
    return [
        *grid("fig1", target, methods, tau, hardware, (64,), CONTEXTS),
        *intensities(target, methods),
        *grid("fig4", target, methods, tau, hardware),
        *ablations(target, hardware),
        *grid("fig6", paper.LLAMA_70B, paper.LLAMA_METHODS, tau, hardware, BATCHES, LONG_CONTEXTS),
        *growth("growing", target, methods, tau, hardware, CONTEXTS, s.new_tokens),
        *growth(
            "growing_llama", paper.LLAMA_70B, paper.LLAMA_METHODS, tau, hardware, LONG_CONTEXTS, s.new_tokens
        ),
        *critical(tau["spire"], hardware),
        *grid("not_overlapped", target, methods, tau, hardware.not_overlapped),
        *grid("full_terms", replace(target, vocab=s.vocab), with_vocab, tau, hardware, full=True),
        *costs(target, methods, tau, hardware),
    ]


def grid(
    figure: str,
    target: Shape,
    methods: Mapping[str, Method],
    tau: Mapping[str, float],
    hardware: Hardware,
    batches: tuple[int, ...] = BATCHES,
    contexts: tuple[int, ...] = CONTEXTS,
    full: bool = False,
) -> list[Row]:
    """A multiplier for every method, batch and context."""
    rows = []
    for name, method in methods.items():
        for batch, context in product(batches, contexts):
            load = Load(batch, context, paper.K)
            one = method.round(target, load.full if full else load)
            rows.append(row(figure, name, batch, context, one.multiplier(tau[name], hardware), tau[name]))
    return rows


def row(
    figure: str, method: str, batch: int, context: int, multiplier: float, tau: float, **more: Any
) -> Row:
    return {
        "figure": figure, "method": method, "batch": batch, "context": context, "multiplier": multiplier,
        "k": paper.K, "tau": tau, "delta_t": tau / multiplier, **more,
    }  # fmt: skip


def intensities(target: Shape, methods: Mapping[str, Method]) -> list[Row]:
    """FLOPs a byte of one step: the target's plain and verifying ones, and each method's draft step."""
    rows = []
    for batch in INTENSITY_BATCHES:
        for context in INTENSITY_CONTEXTS:
            rounds = {name: m.round(target, Load(batch, context, paper.K)) for name, m in methods.items()}
            some = rounds["vanilla"]
            steps = {"autoregressive": some.target, "verify": some.verify}
            steps |= {name: one.draft for name, one in rounds.items() if one.draft}
            for name, step in steps.items():
                place = {"figure": "fig3", "method": name, "batch": batch, "context": context}
                rows.append({**place, "intensity": step.intensity})
    return rows


def ablations(target: Shape, hardware: Hardware) -> list[Row]:
    """SPIRe's variants; ``method`` is the variant. Their tau was measured at a context of 512 only."""
    rows = []
    for variant, a in paper.ABLATIONS.items():
        multiplier = a.method.round(target, Load(*AT, paper.K)).multiplier(a.tau, hardware)
        rows.append(row("fig5", variant, *AT, multiplier, a.tau))
    return rows


def growth(
    figure: str,
    target: Shape,
    methods: Mapping[str, Method],
    tau: Mapping[str, float],
    hardware: Hardware,
    contexts: tuple[int, ...],
    new_tokens: int,
) -> list[Row]:
    """As ``grid``, with times summed while the context grows; ``context`` is the length at the end of the generation."""
    rows = []
    for name, method in methods.items():
        for batch, context in product(BATCHES, contexts):
            if context > new_tokens:
                load = Load(batch, context - new_tokens, paper.K)
                multiplier = growing(method, target, load, tau[name], hardware, new_tokens)
                rows.append(row(figure, name, batch, context, multiplier, tau[name], new_tokens=new_tokens))
    return rows


def critical(tau: float, hardware: Hardware) -> list[Row]:
    """``context`` is the smallest power of two from which SPIRe's multiplier grows with the batch (null: none); the multiplier at B = 128."""
    rows = []
    shapes = {"paper": (paper.TARGET, paper.METHODS), "llama_3_70b": (paper.LLAMA_70B, paper.LLAMA_METHODS)}
    for shape, (target, methods) in shapes.items():
        method, load = methods["spire"], Load(BATCHES[-1], 1, paper.K)
        context = critical_context(method, target, load, tau, hardware, BATCHES)
        at = None if context is None else method.round(target, replace(load, context=context))
        multiplier = None if at is None else at.multiplier(tau, hardware)
        place = {"figure": "l_crit", "method": "spire", "batch": load.batch, "context": context}
        rows.append({**place, "multiplier": multiplier, "shape": shape, "k": paper.K, "tau": tau})
    return rows


def costs(
    target: Shape, methods: Mapping[str, Method], tau: Mapping[str, float], hardware: Hardware
) -> list[Row]:
    """Units of the target's training: invested in the draft, saved of 10 units of serving at (64, 512), and the difference."""
    batch, context = AT
    rows = []
    for name, method in methods.items():
        multiplier = method.round(target, Load(batch, context, paper.K)).multiplier(tau[name], hardware)
        assert method.draft is not None
        share = 0.0 if method.draft == target else training_share(method.draft, target)
        one = Investment(share, multiplier)
        amounts = {"invested": one.share, "serving": one.serving, "saved": one.saved, "net": one.net}
        place = {"figure": "cost", "method": name, "batch": batch, "context": context}
        rows += [{**place, "quantity": quantity, "units": units} for quantity, units in amounts.items()]
    return rows


def report(rows: list[Row]) -> None:
    """The paper's table, its headline, and the same point under other assumptions."""
    found = {(r["figure"], r["method"], r["batch"], r["context"]): r.get("multiplier") for r in rows}
    names = list(paper.METHODS)
    contexts = CONTEXTS[2:]
    print("fig4: throughput multiplier\n\nmethod      B " + "".join(f"{'L=' + str(c):>8}" for c in contexts))
    for batch in (1, 64):
        for name in names:
            cells = "".join(f"{found['fig4', name, batch, c]:8.2f}" for c in contexts)
            print(f"{name:<9} {batch:>3} {cells}")
    print(f"\nat B, L = {AT}:\n")
    print(f"{'':<16}" + "".join(f"{n:>10}" for n in names) + "   spire/vanilla  spire/magicdec")
    for figure in ("fig4", "growing", "not_overlapped", "full_terms"):
        v, m, p = (found[figure, n, *AT] for n in names)
        print(f"{figure:<16}{v:10.2f}{m:10.2f}{p:10.2f}{p / v:16.2f}{p / m:16.2f}")
    for r in rows:
        if r["figure"] == "l_crit":
            print(
                f"\nl_crit, {r['shape']}: SPIRe's multiplier grows with the batch from a context of {r['context']} on",
                end="",
            )
    print("\n\nfig5:")
    for variant in paper.ABLATIONS:
        print(f"  {variant:<28}{found['fig5', variant, *AT]:6.2f}")
    print("\ncost, units of the target's training:")
    for name in names:
        amounts = {r["quantity"]: r["units"] for r in rows if (r["figure"], r["method"]) == ("cost", name)}
        print(f"  {name:<10}" + ", ".join(f"{q} {u:.2f}" for q, u in amounts.items()))


# -- figures ----------------------------------------------------------------------------------------------------------------

NAMES = {
    "autoregressive": "target, plain step",
    "verify": "target, verify step",
    "vanilla": "Vanilla",
    "magicdec": "MagicDec",
    "spire": "SPIRe",
}
COLOURS = {"vanilla": "#7a7a7a", "magicdec": "#d98b2b", "spire": "#1f77b4"}
VARIANTS = {
    "spire": "SPIRe",
    "distillation_only": "distillation loss only",
    "no_feedback": "no feedback memory",
    "random_init": "random initialisation",
    "hard_target_loss": "hard-target loss",
    "no_feedback_no_activations": "no feedback memory,\nno target activations",
    "no_sparse_kv": "no sparse KV cache",
}
HEAT = {
    "fig4": "Throughput multiplier (modelled)",
    "fig6": "Throughput multiplier, Llama 3 70B (modelled)",
    "growing": "Throughput multiplier of a generation of {new_tokens} tokens, by the context at its end",
    "growing_llama": "Throughput multiplier of a generation of {new_tokens} tokens, Llama 3 70B, by the context at its end",
    "not_overlapped": "Throughput multiplier, compute and memory not overlapped",
    "full_terms": "Throughput multiplier with (un)embedding, attention, KV writes and KV refresh",
}


def drawings(rows: list[Row]) -> dict[str, Callable[[], Any]]:
    """Figure -> what draws it."""
    special = {"fig1": lines, "fig3": intensity, "fig5": bars, "cost": units}
    made: dict[str, Callable[[], Any]] = {}
    for figure in dict.fromkeys(r["figure"] for r in rows if r["figure"] != "l_crit"):
        some = [r for r in rows if r["figure"] == figure]
        made[figure] = (
            partial(special[figure], some) if figure in special else partial(heat, some, HEAT[figure])
        )
    return made


def methods(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in rows))


def lines(rows: list[Row]) -> Any:
    drawing, ((axes,),) = plots.panels(1, 1, (6, 4), bare=True)
    for method in methods(rows):
        points = sorted((r["context"], r["multiplier"]) for r in rows if r["method"] == method)
        x, y = zip(*points)
        axes.plot(x, y, "o-", ms=4, color=COLOURS[method])
        axes.annotate(
            NAMES[method], (x[-1], y[-1]), (7, 0), "data", "offset points", color=COLOURS[method], va="center"
        )
    axes.axhline(1, color="black", lw=0.8, ls=":")
    axes.annotate("plain decoding", (x[-1], 1), (0, -4), "data", "offset points", ha="right", va="top")
    context_axis(axes, x)
    axes.set_ylim(0)
    axes.set_ylabel("throughput multiplier")
    axes.set_title(f"Modelled throughput at batch size {rows[0]['batch']}", loc="left")
    axes.grid(alpha=0.25)
    return drawing


def context_axis(axes: Any, values: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [plots.short(v) for v in values])
    axes.set_xlabel("context length")


def intensity(rows: list[Row]) -> Any:
    import matplotlib

    names = methods(rows)
    contexts = sorted({r["context"] for r in rows})
    drawing, (panels,) = plots.panels(1, len(names), (3 * len(names), 3.6), bare=True, sharey=True)
    shades = matplotlib.colormaps["viridis"]
    for axes, method in zip(panels, names):
        for i, context in enumerate(contexts):
            points = sorted(
                (r["batch"], r["intensity"]) for r in rows if (r["method"], r["context"]) == (method, context)
            )
            x, y = zip(*points)
            axes.plot(x, y, color=shades(0.9 * i / (len(contexts) - 1)), label=f"L = {plots.short(context)}")
        axes.axhline(600, color="crimson", lw=1, ls="--")
        axes.set_title(NAMES[method] + (", draft step" if method in COLOURS else ""), loc="left", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x[::2], [plots.short(v) for v in x[::2]])
        axes.set_yscale("log")
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.25)
    panels[0].annotate("H100: 600", (x[0], 600), (0, 3), "data", "offset points", color="crimson", fontsize=9)
    panels[0].set_ylabel("FLOPs a byte")
    panels[-1].legend(fontsize=8, loc="lower right")
    drawing.suptitle(
        "Operational intensity: below the line a step is memory-bound", x=0.125, ha="left", fontsize=12
    )
    drawing.subplots_adjust(wspace=0.08, top=0.83)
    return drawing


def heat(rows: list[Row], title: str) -> Any:
    names = methods(rows)
    batches, contexts = sorted({r["batch"] for r in rows}), sorted({r["context"] for r in rows})
    # White is plain decoding's speed, red is slower; the same scale in every figure that stays below 3.5.
    norm = plots.around_one(max(r["multiplier"] for r in rows), 3.5)
    drawing, (panels,) = plots.panels(1, len(names), (5.4 * len(names), 3.9), sharey=True)
    for axes, method in zip(panels, names):
        value = {(r["batch"], r["context"]): r["multiplier"] for r in rows if r["method"] == method}
        image = plots.heat(axes, batches, contexts, norm, value)
        axes.set_xlabel("context length")
        axes.set_title(NAMES[method], loc="left")
    panels[0].set_ylabel("batch size")
    drawing.subplots_adjust(wspace=0.04, top=0.84, right=0.93)
    place = panels[-1].get_position()
    plots.scale(drawing, image, (0.945, place.y0, 0.009, place.height))
    drawing.suptitle(title.format(**rows[0]), x=0.125, ha="left", fontsize=12)
    return drawing


def bars(rows: list[Row]) -> Any:
    drawing, ((axes,),) = plots.panels(1, 1, (6.4, 3.6), bare=True)
    values = [r["multiplier"] for r in rows]
    colours = [COLOURS["spire"] if r["method"] == "spire" else "#9ec5e3" for r in rows]
    marks = axes.barh([VARIANTS[r["method"]] for r in rows], values, color=colours)
    for label, r in zip(axes.bar_label(marks, fmt="%.2f", padding=-30), rows):
        label.set_color("white" if r["method"] == "spire" else "black")
    axes.axvline(values[0], color=COLOURS["spire"], lw=0.8, ls=":")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("throughput multiplier")
    axes.set_title(
        f"SPIRe without its parts, batch size {rows[0]['batch']}, context {rows[0]['context']}", loc="left"
    )
    return drawing


def units(rows: list[Row]) -> Any:
    drawing, ((axes,),) = plots.panels(1, 1, (6.4, 3.0), bare=True)
    names = methods(rows)
    shown = {"invested": "#c44e52", "saved": "#9ec5e3", "net": "#1f77b4"}
    for i, (quantity, colour) in enumerate(shown.items()):
        values = [
            next(r["units"] for r in rows if (r["method"], r["quantity"]) == (n, quantity)) for n in names
        ]
        marks = axes.barh(
            [n + 0.27 * (i - 1) for n in range(len(names))], values, 0.25, color=colour, label=quantity
        )
        axes.bar_label(marks, fmt="%.2f", padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), [NAMES[n] for n in names])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 8)
    axes.set_xlabel("units of the target's training")
    axes.set_title("Cost of the draft and what it saves of 10 units of serving", loc="left")
    axes.legend(fontsize=9, loc="upper right", frameon=False)
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
