// The words of the page, in English and Chinese. `data-t` on an element names its text, `data-t-label` its label.
// Shown by tests/page/test_access.py.

import { EN } from "./words/en.js";
import { ZH } from "./words/zh.js";

/** @type {Record<string, Record<string, string>>} */
export const LANGUAGES = { en: EN, zh: ZH };

const STORED = "antiphon.language";

/** @returns {string} chosen before, or the browser's if it is ours, or English */
export function preferred() {
  const wanted = localStorage.getItem(STORED) ?? navigator.language.slice(0, 2);
  return wanted in LANGUAGES ? wanted : "en";
}

/** @param {string} language */
export function use(language) {
  localStorage.setItem(STORED, language);
  document.documentElement.lang = language;
  translate(document.body);
  document.title = t(document.body.dataset.title);
}

/** @param {string} key @param {Record<string, string | number>} values for the words in braces @returns {string} */
export function t(key, values = {}) {
  const words = LANGUAGES[document.documentElement.lang]?.[key] ?? EN[key];
  if (words === undefined) throw new Error(`no words are called ${key}`);
  return words.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

/** @param {HTMLElement} root */
export function translate(root) {
  for (const element of root.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of root.querySelectorAll("[data-t-label]")) {
    element.setAttribute("aria-label", t(element.dataset.tLabel));
  }
  for (const element of root.querySelectorAll("[data-t-hint]"))
    element.setAttribute("placeholder", t(element.dataset.tHint));
}
