// Captions as files: text for people, WebVTT for players. Of an answer that was cut, only what was heard.
// Shown by tests/page/test_saving.py.

import { numHeard, piece } from "./transcript.js";

const MIN_CUE_MS = 500;
const MAX_CUE_MS = 6000;

/** @param {import("./transcript.js").Turn[]} turns @param {(who: string) => string} nameOf @returns {string} */
export function asText(turns, nameOf) {
  return turns
    .map(
      (turn) =>
        `[${clock(turn.startMs).slice(0, 8)}] ${nameOf(turn.who)}: ${heardText(turn)}${turn.isCut ? " —" : ""}\n`,
    )
    .join("");
}

/** @param {import("./transcript.js").Turn[]} turns @param {(who: string) => string} nameOf @returns {string} */
export function asVtt(turns, nameOf) {
  const cues = turns.flatMap((turn) => cuesOf(turn)).sort((one, other) => one.startMs - other.startMs);
  const body = cues.map(
    (cue) => `${clock(cue.startMs)} --> ${clock(cue.endMs)}\n<v ${nameOf(cue.who)}>${escaped(cue.text)}\n\n`,
  );
  return `WEBVTT\n\n${body.join("")}`;
}

/** @param {import("./transcript.js").Turn} turn @returns {string} */
function heardText(turn) {
  return piece(turn.text, 0, numHeard(turn)).trim();
}

/** One cue for as many words as are said in a few seconds. @param {import("./transcript.js").Turn} turn */
function cuesOf(turn) {
  const heard = heardText(turn).length === 0 ? 0 : numHeard(turn);
  const marks = turn.marks.filter((mark) => mark.endMs <= turn.playedMs && mark.numCharacters <= heard);
  const last = marks[marks.length - 1];
  if (last === undefined || last.numCharacters < heard)
    marks.push({ numCharacters: heard, endMs: turn.endMs - turn.startMs });
  const cues = [];
  let from = { numCharacters: 0, endMs: 0 };
  marks.forEach((mark, place) => {
    const isLast = place === marks.length - 1;
    if (!isLast && marks[place + 1].endMs - from.endMs < MAX_CUE_MS) return;
    const text = piece(turn.text, from.numCharacters, mark.numCharacters).trim();
    const startMs = turn.startMs + from.endMs;
    const endMs = Math.max(startMs + MIN_CUE_MS, turn.startMs + mark.endMs);
    if (text !== "") cues.push({ who: turn.who, startMs, endMs, text });
    from = mark;
  });
  return cues;
}

/** @param {string} text @returns {string} as the words of a cue, whatever is in them */
function escaped(text) {
  return text
    .replace(/&/g, "&amp;")
    .replace(/</g, "&lt;")
    .replace(/>/g, "&gt;")
    .replace(/\s*\n\s*/g, " ");
}

/** @param {number} ms @returns {string} hh:mm:ss.mmm */
export function clock(ms) {
  const whole = Math.max(0, Math.round(ms));
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  const rest = String(whole % 1000).padStart(3, "0");
  return `${two(whole / 3600000)}:${two((whole / 60000) % 60)}:${two((whole / 1000) % 60)}.${rest}`;
}
