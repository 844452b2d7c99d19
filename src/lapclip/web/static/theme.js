// Light or dark: as the system says, unless the reader chose otherwise. Runs before the page is painted.
(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("lapclip-theme"); } catch { return null; } };
  const remember = (value) => {
    try {
      if (value) localStorage.setItem("lapclip-theme", value);
      else localStorage.removeItem("lapclip-theme");
    } catch { /* a browser that stores nothing: the choice lasts as long as the page */ }
  };
  const name = (dark) => (dark ? "dark" : "light");
  let chosen = remembered();
  const apply = () => {
    root.dataset.theme = chosen || name(system.matches);
    const button = document.getElementById("theme");
    if (button) button.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
    dispatchEvent(new Event("themechange"));
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      const next = root.dataset.theme === "dark" ? "light" : "dark";
      chosen = next === name(system.matches) ? null : next; // back to the system's: follow it again
      remember(chosen);
      apply();
    });
  });
})();
