"""SPIRe's modelled throughput: every figure of the paper (arXiv 2504.06419), and what changes when its assumptions do.

Nothing is measured or run here: FLOPs and bytes of each step are counted and divided by what a machine does at best (docs/cost.md).
multiplier = throughput over plain decoding's = tau / (k draft steps + 1 verify step, in plain steps). tau is the paper's, k = 4.

fig1 B = 64 over contexts; fig3 operational intensity; fig4 multipliers over batch and context; fig5 ablations at (64, 512); fig6
Llama 3 70B; growing: a generation of --new-tokens from each context; not_overlapped: compute and memory in turn; full_terms: with
(un)embedding, attention, KV writes and KV refresh; cost: units of the target's training. Takes a few seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from _report import write

from specdec.cost import H100_PAPER, Hardware, Investment, Load, Method, Shape, growing, paper, training_share


@dataclass
class Settings:
    tau_context: int = 512
    vocab: int = paper.VOCAB
    new_tokens: int = 1024
    json: str | None = None
    plots: str | None = None


BATCHES = tuple(2**i for i in range(8))  # 1 ... 128
CONTEXTS = tuple(2**i for i in range(3, 14))  # 8 ... 8192
LONG_CONTEXTS = tuple(2**i for i in range(10, 21))  # 1024 ... 1048576
INTENSITY_BATCHES = tuple(2**i for i in range(11))  # 1 ... 1024
INTENSITY_CONTEXTS = (32, 128, 512, 2048, 8192)
AT = (64, 512)  # batch and context of the ablations and of the headline

Row = dict[str, Any]


def main(s: Settings) -> None:
    draw = None
    if s.plots:
        try:
            from _spire_plots import draw
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "matplotlib":
                raise
            raise SystemExit("--plots needs matplotlib: pip install matplotlib") from None
    rows = figures(s)
    report(rows)
    if s.json:
        write(s.json, rows)
    if draw:
        print("\nplots:", ", ".join(draw(rows, s.plots)))


def figures(s: Settings) -> list[Row]:
    """The rows of all figures."""
    if s.tau_context not in paper.TAU:
        raise SystemExit(
            f"tau was measured at contexts {sorted(paper.TAU)}, not at --tau-context {s.tau_context}"
        )
    if s.vocab < 1 or s.new_tokens < 1:
        raise SystemExit(f"--vocab {s.vocab} and --new-tokens {s.new_tokens}: give at least 1")
    tau, hardware = paper.TAU[s.tau_context], H100_PAPER
    target, methods = paper.TARGET, paper.METHODS
    with_vocab = {name: replace(m, draft=replace(m.draft, vocab=s.vocab)) for name, m in methods.items()}
    return [
        *grid("fig1", target, methods, tau, hardware, (64,), CONTEXTS),
        *intensities(target, methods),
        *grid("fig4", target, methods, tau, hardware),
        *ablations(target, hardware),
        *grid("fig6", paper.LLAMA_70B, paper.LLAMA_METHODS, tau, hardware, BATCHES, LONG_CONTEXTS),
        *growth(target, methods, tau, hardware, s.new_tokens),
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
        for batch in batches:
            for context in contexts:
                load = Load(batch, context, paper.K)
                one = method.round(target, load.full if full else load)
                rows.append(row(figure, name, batch, context, one.multiplier(tau[name], hardware), tau[name]))
    return rows


def row(
    figure: str, method: str, batch: int, context: int, multiplier: float, tau: float, **more: Any
) -> Row:
    return {
        "figure": figure,
        "method": method,
        "batch": batch,
        "context": context,
        "multiplier": multiplier,
        "k": paper.K,
        "tau": tau,
        "delta_t": tau / multiplier,
        **more,
    }


def intensities(target: Shape, methods: Mapping[str, Method]) -> list[Row]:
    """FLOPs a byte of one step: the target's plain and verifying ones, and each method's draft step."""
    rows = []
    for batch in INTENSITY_BATCHES:
        for context in INTENSITY_CONTEXTS:
            rounds = {name: m.round(target, Load(batch, context, paper.K)) for name, m in methods.items()}
            some = rounds["vanilla"]
            steps = {"autoregressive": some.target, "verify": some.verify}
            steps |= {name: one.draft for name, one in rounds.items() if one.draft}
            rows += [
                {
                    "figure": "fig3",
                    "method": name,
                    "batch": batch,
                    "context": context,
                    "intensity": step.intensity,
                }
                for name, step in steps.items()
            ]
    return rows


def ablations(target: Shape, hardware: Hardware) -> list[Row]:
    """SPIRe's variants; ``method`` is the variant. Their tau was measured at a context of 512 only."""
    batch, context = AT
    return [
        row(
            "fig5",
            variant,
            batch,
            context,
            a.method.round(target, Load(batch, context, paper.K)).multiplier(a.tau, hardware),
            a.tau,
        )
        for variant, a in paper.ABLATIONS.items()
    ]


def growth(
    target: Shape,
    methods: Mapping[str, Method],
    tau: Mapping[str, float],
    hardware: Hardware,
    new_tokens: int,
) -> list[Row]:
    """As fig4, with times summed while the context grows; ``context`` is where the generation starts."""
    return [
        row(
            "growing",
            name,
            batch,
            context,
            growing(method, target, Load(batch, context, paper.K), tau[name], hardware, new_tokens, stride=8),
            tau[name],
            new_tokens=new_tokens,
        )
        for name, method in methods.items()
        for batch in BATCHES
        for context in CONTEXTS
    ]


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
        rows += [
            {
                "figure": "cost",
                "method": name,
                "batch": batch,
                "context": context,
                "quantity": quantity,
                "units": units,
            }
            for quantity, units in amounts.items()
        ]
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
    print("\nfig5:")
    for variant in paper.ABLATIONS:
        print(f"  {variant:<28}{found['fig5', variant, *AT]:6.2f}")
    print("\ncost, units of the target's training:")
    for name in names:
        amounts = {r["quantity"]: r["units"] for r in rows if (r["figure"], r["method"]) == ("cost", name)}
        print(f"  {name:<10}" + ", ".join(f"{q} {u:.2f}" for q, u in amounts.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument(
        "--tau-context",
        type=int,
        default=d.tau_context,
        help="take tau as measured at this context: 256, 512 or 960 (default: %(default)s, the paper's choice)",
    )
    parser.add_argument("--vocab", type=int, default=d.vocab, help="of full_terms (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=d.new_tokens, help="of growing (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plots", metavar="DIR", help="write a PNG for each figure (needs matplotlib)")
    a = parser.parse_args()
    main(Settings(a.tau_context, a.vocab, a.new_tokens, a.json, a.plots))
