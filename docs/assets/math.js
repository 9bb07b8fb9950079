// Renders the formulas of a page (pymdownx.arithmatex, generic) with the KaTeX beside this file, which only pages with formulas load.
(() => {
  const formulas = document.querySelectorAll(".arithmatex");
  if (!formulas.length) return;
  const folder = new URL("katex/", document.currentScript.src);
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("katex.min.css", folder);
  const script = document.createElement("script");
  script.src = new URL("katex.min.js", folder);
  script.onload = () => {
    for (const formula of formulas) {
      const text = formula.textContent.trim().slice(2, -2); // between \( and \), or \[ and \]
      katex.render(text, formula, { displayMode: formula.tagName === "DIV", throwOnError: true });
    }
  };
  document.head.append(style, script);
})();
