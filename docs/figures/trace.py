"""Writes trace.html: three rounds of a real decoder, step by step, which the first page of the documentation includes.

python docs/figures/trace.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import specdec as sd
from specdec.drafts.siblings import Distinct
from specdec.types import Round

PROMPT, SEED, ROUNDS = "def fibonacci(n):\n", 3, 3
WIDE, HIGH, ACROSS, DOWN = 112, 44, 150, 52
FILE = Path(__file__).with_suffix(".html")


def run() -> tuple[sd.Decoder, list[Round]]:
    draft = sd.drafts.Tree(sd.HFModel(*sd.zoo.load("pocket-vanilla")), widths=(2, 2, 1), siblings=Distinct())
    decoder = sd.decoder("pocket-target").draft(draft, length=3).sampling(temperature=0.8).build()
    rounds: list[Round] = []
    decoder.generate(PROMPT, max_new_tokens=24, seed=SEED, on_round=rounds.append)
    return decoder, rounds[1 : 1 + ROUNDS]  # round 0 is the prefill


def word(decoder: sd.Decoder, token: int) -> str:
    text = decoder.target.tokenizer.decode([token])
    return escape(text.replace("\n", "↵").replace(" ", "·"))


def tree(decoder: sd.Decoder, round: Round, step: str) -> str:
    """The proposal as a drawing; ``step`` is "draft", "target", "verify" or "commit"."""
    proposal, path = round.proposal, round.verdict.path[0].tolist()
    tokens, parents = proposal.tokens[0].tolist(), proposal.parents[0].tolist()
    q = proposal.q_of(proposal.tokens)[0].tolist()
    stands = {-1, *(node for node in path if node >= 0)}
    children = {node: [n for n, p in enumerate(parents) if p == node] for node in range(-1, len(tokens))}
    at: dict[int, tuple[int, float]] = {}

    def place(node: int, depth: int, top: int) -> int:
        """Puts a node beside the middle of its children; returns the first free line below them."""
        below = top
        for child in children[node]:
            below = place(child, depth + 1, below)
        at[node] = (depth, (top + max(below, top + 1) - 1) / 2)
        return max(below, top + 1)

    lines = place(-1, 0, 0)
    drawn = []
    for node, (depth, line) in sorted(at.items()):
        x, y = depth * ACROSS + 4, line * DOWN + 4
        if node < 0:
            name, below, kind = "…", "the text", "root"
        else:
            px, py = at[parents[node]][0] * ACROSS + 4 + WIDE, at[parents[node]][1] * DOWN + 4 + HIGH / 2
            drawn.append(f'<path d="M{px} {py:.0f}L{x} {y + HIGH / 2:.0f}"/>')
            p = float(round.probs[0, 1 + parents[node], tokens[node]])  # type: ignore[index]
            name, below, kind = word(decoder, tokens[node]), f"q {q[node]:.2f}", "new"
            if step != "draft":
                below = f"p {p:.2f}, {below}"
            if step in ("verify", "commit"):
                kind = "yes" if node in stands else "no" if parents[node] in stands else "off"
                if kind == "no" and any(n in stands and n < node for n in children[parents[node]]):
                    kind = "off"  # an elder sibling was accepted
        drawn.append(
            f'<g class="{kind}"><rect x="{x}" y="{y:.0f}" width="{WIDE}" height="{HIGH}" rx="8"/>'
            f'<text x="{x + WIDE / 2}" y="{y + 19:.0f}">{name}</text>'
            f'<text class="sub" x="{x + WIDE / 2}" y="{y + 36:.0f}">{below}</text></g>'
        )
    wide, high = 3 * ACROSS + WIDE + 8, lines * DOWN
    return f'<div class="scroll"><svg viewBox="0 0 {wide} {high}" width="{wide}">{"".join(drawn)}</svg></div>'


def steps() -> list[str]:
    decoder, rounds = run()
    out = []
    for number, round in enumerate(rounds, 1):
        accepted, bonus = int(round.verdict.accepted[0]), int(round.verdict.bonus[0])
        committed = round.verdict.tokens[0, : int(round.committed[0])].tolist()
        decode = decoder.target.tokenizer.decode
        before = escape(decode(round.context.row(0)))
        after = f'{before}<mark>{escape(decode(committed[:accepted]))}</mark><mark class="bonus">{escape(decode(committed[accepted:]))}</mark>'
        said = {
            "draft": f"The draft proposes a tree of {round.proposal.nodes} tokens. Every node carries q, the probability with which it was drawn.",
            "target": "One forward of the target gives its probability p of every node, given the path to it.",
            "verify": "The verifier tries siblings in order: green is accepted, red is rejected, grey is not reached. "
            + (f"{accepted} accepted." if accepted else "None is accepted."),
            "commit": f"The accepted tokens and one bonus token of the target, <code>{word(decoder, bonus)}</code>, are committed: "
            f"{accepted + 1} in one forward of the target.",
        }
        for step, text in said.items():
            shown = after if step == "commit" else before
            out.append(
                f'<figure><figcaption><b>Round {number}, {step}.</b> {text}</figcaption><div class="text">{shown}</div>'
                f"{tree(decoder, round, step)}</figure>"
            )
    return out


STYLE = """
.trace{border:1px solid #8fa0a866;border-radius:8px;padding:.6rem .8rem;margin:1rem 0}
.trace figure{margin:.4rem 0;width:100%;text-align:left;max-width:none}
.trace.on figure{display:none}.trace.on figure.shown{display:block}
.trace figcaption{margin:0 0 .4rem;max-width:none;font-style:normal;min-height:3.2em}
.trace .text{font-family:monospace;font-size:.7rem;white-space:pre-wrap;background:#8fa0a822;border-radius:6px;padding:.4rem .6rem;min-height:6em}
.trace mark{background:#2e8b5755;color:inherit}.trace mark.bonus{background:#c27c1266}
.trace .scroll{overflow-x:auto;margin-top:.6rem}.trace svg{max-width:none;height:auto}
.trace rect{fill:#8fa0a81a;stroke:#78909c;stroke-width:1.5}.trace path{stroke:#78909c;stroke-width:1.5;fill:none}
.trace svg text{fill:currentColor;text-anchor:middle;font:600 14px monospace}.trace svg .sub{font:12px sans-serif}
.trace .yes rect{fill:#2e8b5744;stroke:#2e8b57;stroke-width:3}.trace .no rect{fill:#c0392b2b;stroke:#c0392b;stroke-width:2.5}
.trace .off{opacity:.5}.trace button{border:1px solid #78909c;border-radius:6px;padding:.2rem .8rem;margin-right:.4rem;cursor:pointer}
.trace button:disabled{opacity:.4;cursor:default}
"""
SCRIPT = """
(() => {
  const all = document.currentScript.closest(".trace"), steps = all.querySelectorAll("figure"), bar = all.querySelector("nav");
  const [back, next] = bar.querySelectorAll("button"), count = bar.querySelector("span");
  let at = 0;
  const show = (by) => {
    at += by;
    steps.forEach((step, n) => step.classList.toggle("shown", n === at));
    back.disabled = at === 0; next.disabled = at === steps.length - 1;
    count.textContent = `${at + 1} of ${steps.length}`;
  };
  back.onclick = () => show(-1); next.onclick = () => show(1);
  bar.hidden = false; all.classList.add("on"); show(0);
})();
"""


def page() -> str:
    bar = '<nav hidden><button type="button">Back</button><button type="button">Next</button><span></span></nav>'
    style = "".join(line.strip() for line in STYLE.splitlines())
    script = " ".join(line.strip() for line in SCRIPT.splitlines()).strip()
    figures = "\n".join(step.replace("\n", "&#10;") for step in steps())
    return (
        f'<div class="trace">\n<style>{style}</style>\n{bar}\n{figures}\n<script>{script}</script>\n</div>\n'
    )


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
