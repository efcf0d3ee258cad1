// What happened when, for hours: stretches of time on lanes, and marks. Bounded; what is visible is found by halving.
// Times in ms of the call. Shown by tests/page/test_history.py.

/** More than ten hours of a lively talk; older ones go. */
const MAX_ENTRIES = 40000;
const DROPPED_AT_ONCE = 1000;

/** @typedef {{startMs: number, endMs: number}} Span */
/** @typedef {{atMs: number, kind: "interruption" | "slide" | "change" | "underrun" | "cut" | "typed"}} Mark */

/** Owns the stretches of one lane. The last one may still grow. */
export class Lane {
  constructor() {
    /** @type {Span[]} */
    this.spans = [];
    this.isOpen = false;
  }

  /** Something goes on, or does not. @param {boolean} isOn @param {number} nowMs */
  set(isOn, nowMs) {
    if (isOn && !this.isOpen) {
      this.spans.push({ startMs: nowMs, endMs: nowMs });
      bound(this.spans);
    }
    if (this.isOpen) this.spans[this.spans.length - 1].endMs = nowMs;
    this.isOpen = isOn;
  }

  /** @param {number} startMs @param {number} endMs @returns {Span[]} those that touch this time */
  within(startMs, endMs) {
    const first = firstAt(this.spans, (span) => span.endMs >= startMs);
    const last = firstAt(this.spans, (span) => span.startMs > endMs);
    return this.spans.slice(first, last);
  }
}

/** Owns all that a time line shows. */
export class History {
  constructor() {
    this.caller = new Lane();
    this.model = new Lane();
    /** @type {Mark[]} */
    this.marks = [];
  }

  /** @param {Mark["kind"]} kind @param {number} atMs */
  mark(kind, atMs) {
    this.marks.push({ atMs, kind });
    bound(this.marks);
  }

  /** @param {number} startMs @param {number} endMs @returns {Mark[]} */
  marksWithin(startMs, endMs) {
    const first = firstAt(this.marks, (mark) => mark.atMs >= startMs);
    const last = firstAt(this.marks, (mark) => mark.atMs > endMs);
    return this.marks.slice(first, last);
  }
}

/** @param {unknown[]} entries */
function bound(entries) {
  if (entries.length > MAX_ENTRIES) entries.splice(0, DROPPED_AT_ONCE);
}

/**
 * @template T
 * @param {T[]} entries in order of time @param {(entry: T) => boolean} holds from one of them on
 * @returns {number} where it holds first
 */
function firstAt(entries, holds) {
  let start = 0;
  let end = entries.length;
  while (start < end) {
    const middle = (start + end) >> 1;
    if (holds(entries[middle])) end = middle;
    else start = middle + 1;
  }
  return start;
}
