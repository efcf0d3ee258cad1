// What is said, as it is heard: a log that a screen reader reads too. Only the newest turns are in the document.
// Shown by tests/page/test_talk.py.

import { numHeard, piece } from "../call/transcript.js";
import { t } from "../i18n.js";
import { make, mark, write } from "./dom.js";
import { clockOf } from "./timeline.js";

const MAX_SHOWN = 120;
/** So near its end, the log is at its end, and follows. */
const NEAR_PIXELS = 40;

/** Owns the elements of the turns. */
export class Captions {
  /** @param {HTMLElement} list */
  constructor(list) {
    this.list = list;
    /** @type {Map<string, {turn: import("../call/transcript.js").Turn, heard: HTMLElement, ahead: HTMLElement, row: HTMLElement}>} */
    this.open = new Map();
  }

  clear() {
    this.open.clear();
    this.list.replaceChildren();
  }

  /** @param {import("../call/transcript.js").Turn} turn */
  add(turn) {
    const heard = make("span", { class: "heard" });
    const ahead = make("span", { class: "ahead" });
    const who = make("span", { class: "who" }, [t(turn.who === "model" ? "who.model" : "who.caller")]);
    const time = make("time", { class: "when" }, [clockOf(turn.startMs)]);
    const row = make("div", { class: `turn ${turn.who}` }, [
      make("div", { class: "meta" }, [who, time]),
      make("p", { lang: "" }, [heard, ahead]),
    ]);
    const isAtEnd = this.isAtEnd;
    this.list.append(row);
    while (this.list.childElementCount > MAX_SHOWN) this.list.firstElementChild?.remove();
    this.open.set(turn.id, { turn, heard, ahead, row });
    this.update();
    if (isAtEnd) this.scroll();
  }

  /** Show how far what is being said is heard. */
  update() {
    const isAtEnd = this.isAtEnd;
    for (const [id, { turn, heard, ahead, row }] of this.open) {
      const length = numHeard(turn);
      write(heard, piece(turn.text, 0, length));
      write(ahead, piece(turn.text, length, Infinity));
      if (turn.isOver) {
        if (turn.isCut) mark(row, "data-cut", "");
        this.open.delete(id);
      }
    }
    if (isAtEnd) this.scroll();
  }

  get isAtEnd() {
    return this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < NEAR_PIXELS;
  }

  scroll() {
    this.list.scrollTop = this.list.scrollHeight;
  }
}
