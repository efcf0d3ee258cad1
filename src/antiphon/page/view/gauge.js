// The window gauge: how much the model holds, of what, and when the oldest seconds go. Shown by tests/page/test_memory.py.

import { t } from "../i18n.js";
import { byId, mark, write } from "./dom.js";

/** @param {import("../call/memory.js").Memory} memory */
export function showGauge(memory) {
  const limit = Math.max(memory.limitTokens, memory.contextTokens, 1);
  const share = (tokens) => `${(100 * tokens) / limit}%`;
  byId("gauge-anchor").style.setProperty("width", share(memory.anchorTokens));
  byId("gauge-previous").style.setProperty("width", share(memory.previousTokens));
  byId("gauge-ring").style.setProperty("width", share(memory.ringTokens));
  write(byId("gauge-mode"), t(`window.${memory.window.mode}`));
  write(byId("gauge-total"), t("gauge.total", { tokens: number(memory.contextTokens), limit: number(limit) }));
  const own = t(memory.isAnchorShared ? "gauge.shared" : "gauge.own");
  const anchor = memory.isAnchorKnown ? `${number(memory.anchorTokens)} · ${own}` : "–";
  write(byId("gauge-anchor-text"), anchor);
  write(byId("gauge-previous-text"), memory.window.mode === "context" ? number(memory.previousTokens) : "–");
  write(byId("gauge-ring-text"), t("gauge.ring", { tokens: number(memory.ringTokens), units: number(memory.units) }));
  write(byId("gauge-blocks-text"), memory.blocks === 0 ? "–" : number(memory.blocks));
  write(byId("gauge-slide-text"), nextSlide(memory));
  mark(
    byId("gauge-bar"),
    "aria-label",
    t("gauge.label", { percent: number(Math.round((100 * memory.contextTokens) / limit)) }),
  );
}

/** @param {import("../call/memory.js").Memory} memory @returns {string} */
function nextSlide(memory) {
  const seconds = memory.fullInS;
  if (seconds === Infinity) return "–";
  if (memory.window.mode === "off") return t("gauge.ends", { seconds: number(seconds) });
  return t("gauge.slides", { seconds: number(seconds), slides: number(memory.numSlides) });
}

/** @param {number} value @returns {string} */
function number(value) {
  return value.toLocaleString(document.documentElement.lang);
}
