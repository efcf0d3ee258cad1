// The panel of numbers. Shown by tests/page/test_memory.py.

import { t } from "../i18n.js";
import { byId, mark, write } from "./dom.js";

/** Slower than this, and the model falls behind the caller. */
const UNIT_LIMIT_MS = 1000;

/** @param {import("../call/figures.js").Figures} figures @param {number} numSlides @param {number} numInterruptions */
export function showFigures(figures, numSlides, numInterruptions) {
  write(byId("figure-unit"), ms(figures.unitMs));
  mark(byId("figure-unit"), "data-late", String(figures.unitMs > UNIT_LIMIT_MS));
  write(byId("figure-slowest"), ms(figures.slowestUnitMs));
  write(byId("figure-first"), ms(figures.firstAudioMs));
  write(byId("figure-round"), ms(figures.roundTripMs));
  write(byId("figure-lead"), ms(figures.leadMs));
  write(byId("figure-target"), ms(figures.targetMs));
  write(byId("figure-underruns"), String(figures.numUnderruns));
  write(byId("figure-slides"), String(numSlides));
  write(byId("figure-interruptions"), String(numInterruptions));
  write(byId("figure-opening"), ms(figures.openingMs));
  write(byId("figure-prompt"), figures.isPromptHit === null ? "–" : t(figures.isPromptHit ? "yes" : "no"));
}

/** @param {number} value @returns {string} */
function ms(value) {
  return Number.isNaN(value) ? "–" : `${Math.round(value).toLocaleString(document.documentElement.lang)} ms`;
}
