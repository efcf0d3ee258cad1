// What both sides said, as far as there are words for it, and how much of the model's was heard.
// Times in ms of the call. Shown by tests/page/test_saving.py.

const MAX_TURNS = 20000;
const DROPPED_AT_ONCE = 500;

/** @typedef {{numCharacters: number, endMs: number}} WordMark by this time of a turn's sound, so much of its text is said */
/** @typedef {{id: string, who: "caller" | "model", startMs: number, endMs: number, text: string, marks: WordMark[],
 *             playedMs: number, isCut: boolean, isOver: boolean}} Turn playedMs: of its sound */

/** Owns the turns; those of the model by the id of their item. */
export class Transcript {
  constructor() {
    /** @type {Turn[]} */
    this.turns = [];
    /** @type {Map<string, Turn>} the open ones, by item */
    this.open = new Map();
  }

  /** @param {Turn["who"]} who @param {string} id @param {string} text @param {number} nowMs @returns {Turn} */
  begin(who, id, text, nowMs) {
    const isOver = who === "caller";
    const turn = { id, who, startMs: nowMs, endMs: nowMs, text, marks: [], playedMs: 0, isCut: false, isOver };
    this.turns.push(turn);
    if (!isOver) this.open.set(id, turn);
    if (this.turns.length > MAX_TURNS) this.turns.splice(0, DROPPED_AT_ONCE);
    return turn;
  }

  /** More words of the model. @param {string} id @param {string} words @returns {Turn | undefined} */
  say(id, words) {
    const turn = this.open.get(id);
    if (turn !== undefined) turn.text += words;
    return turn;
  }

  /** @param {string} id @param {WordMark[]} marks */
  mark(id, marks) {
    this.open.get(id)?.marks.push(...marks);
  }

  /** Its sound is heard, so much of it by now. @param {string} id @param {number} playedMs @param {number} nowMs */
  play(id, playedMs, nowMs) {
    const turn = this.open.get(id);
    if (turn === undefined) return;
    if (turn.playedMs === 0) turn.startMs = nowMs - playedMs;
    turn.playedMs = playedMs;
    turn.endMs = nowMs;
  }

  /** Nothing more of it will be heard. @param {string} id @param {boolean} isCut @returns {Turn | undefined} */
  end(id, isCut) {
    const turn = this.open.get(id);
    if (turn === undefined) return undefined;
    this.open.delete(id);
    turn.isOver = true;
    turn.isCut = isCut;
    return turn;
  }
}

const SURROGATES = /[\ud800-\udfff]/;

/** A part of a text, counted as the server counts: a character outside of the basic plane is one, and two here.
 *  @param {string} text @param {number} start @param {number} end @returns {string} */
export function piece(text, start, end) {
  return SURROGATES.test(text) ? [...text].slice(start, end).join("") : text.slice(start, end);
}

/** @param {string} text @returns {number} */
function numCharacters(text) {
  return SURROGATES.test(text) ? [...text].length : text.length;
}

/** How much of a turn's text its listener has heard. @param {Turn} turn @returns {number} characters */
export function numHeard(turn) {
  if (turn.who === "caller" || (turn.isOver && !turn.isCut)) return numCharacters(turn.text);
  let before = { numCharacters: 0, endMs: 0 };
  for (const mark of turn.marks) {
    if (mark.endMs > turn.playedMs) {
      const part = (turn.playedMs - before.endMs) / (mark.endMs - before.endMs);
      return before.numCharacters + Math.floor(part * (mark.numCharacters - before.numCharacters));
    }
    before = mark;
  }
  return before.numCharacters;
}
