// A latency, as its usual and its worst values and as columns. Shown by tests/page/test_ops.py.

import { t } from "../i18n.js";
import { make } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 56;
const SVG = "http://www.w3.org/2000/svg";

/** @param {string} title @param {import("../metrics.js").Histogram} histogram @returns {HTMLElement} */
export function drawHistogram(title, histogram) {
  const quantiles = [
    ["ops.median", 0.5],
    ["ops.most", 0.95],
    ["ops.nearly", 0.99],
  ];
  const words = quantiles.map(([name, part]) => `${t(name)} ${ms(histogram, part)}`).join(" · ");
  return make("div", { class: "histogram" }, [
    make("h3", {}, [title, make("span", { class: "quiet" }, [` · ${t("ops.count", { count: histogram.count })}`])]),
    make("p", { class: "quiet" }, [words]),
    columns(histogram, `${title}: ${words}`),
  ]);
}

/** @param {import("../metrics.js").Histogram} histogram @param {string} label @returns {SVGElement} */
function columns(histogram, label) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", label);
  const { counts } = histogram;
  const most = Math.max(1, ...counts);
  const step = WIDTH / Math.max(1, counts.length);
  counts.forEach((count, place) => {
    const column = document.createElementNS(SVG, "rect");
    const height = Math.max(1, (count / most) * (HEIGHT - 2));
    const shape = { x: place * step, y: HEIGHT - height, width: step - 2, height };
    for (const [name, value] of Object.entries(shape)) column.setAttribute(name, String(value));
    const title = document.createElementNS(SVG, "title");
    title.textContent = `≤ ${seconds(histogram.buckets[place].upTo)}: ${count}`;
    column.append(title);
    drawing.append(column);
  });
  return drawing;
}

/** @param {import("../metrics.js").Histogram} histogram @param {number} part @returns {string} */
function ms(histogram, part) {
  const value = histogram.quantile(part);
  if (Number.isNaN(value)) return "–";
  const last = histogram.buckets[histogram.buckets.length - 2].upTo;
  return value === Infinity ? `> ${seconds(last)}` : seconds(value);
}

/** @param {number} value @returns {string} */
function seconds(value) {
  return value === Infinity ? "∞" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}
