// What the model's window holds, second by second, and when it slides next: what the server reports, and what follows.
// Shown by tests/page/test_memory.py.

/** Growth is averaged over so many seconds. */
const GROWTH_UNITS = 20;

/** @typedef {{mode: "off" | "basic" | "context", max_tokens: number, high_tokens: number, low_tokens: number,
 *             max_units: number, previous_max_tokens: number}} Window as the server offers it */

/** Owns the numbers of the gauge. */
export class Memory {
  /** @param {Window} window that the call begins with */
  constructor(window) {
    this.window = window;
    this.anchorTokens = 0;
    this.isAnchorKnown = false;
    this.isAnchorShared = false;
    this.previousTokens = 0;
    this.contextTokens = 0;
    this.blocks = 0;
    this.units = 0;
    this.numSlides = 0;
    this.growthTokens = 0;
  }

  /** @param {any} event of the server */
  hear(event) {
    switch (event.type) {
      case "session.opened":
        this.anchorTokens = event.prompt_tokens;
        this.isAnchorKnown = true;
        this.isAnchorShared = event.is_prompt_shared;
        this.contextTokens = event.prompt_tokens;
        break;
      case "session.unit_decided":
        this.count(event);
        break;
      case "session.window_slid":
        this.numSlides += 1;
        this.previousTokens = event.previous_tokens;
        this.contextTokens = event.context_tokens;
        break;
      case "session.call_changed":
        this.contextTokens = event.context_tokens;
        break;
    }
  }

  /** A change of the call holds. @param {Window} window @param {boolean} isPromptSame */
  change(window, isPromptSame) {
    this.window = window;
    if (!isPromptSame) {
      // The server says what the changed call holds, not how much of it is the prompt.
      this.isAnchorKnown = false;
      this.anchorTokens = 0;
      this.isAnchorShared = false;
    }
  }

  /** @param {any} event a second that was decided */
  count(event) {
    const grown = event.context_tokens - this.contextTokens;
    if (grown > 0) {
      const weight = this.growthTokens === 0 ? 1 : 1 / GROWTH_UNITS;
      this.growthTokens += weight * (grown - this.growthTokens);
    }
    this.contextTokens = event.context_tokens;
    this.blocks = event.context_blocks;
    this.units = event.retained_units;
  }

  get ringTokens() {
    return Math.max(0, this.contextTokens - this.anchorTokens - this.previousTokens);
  }

  /** What the context grows to, in tokens, as far as that is known; in context mode it is counted in seconds. */
  get limitTokens() {
    switch (this.window.mode) {
      case "off":
        return this.window.max_tokens;
      case "basic":
        return this.window.high_tokens;
      default: {
        const perUnit = this.units > 0 ? this.ringTokens / this.units : 0;
        return Math.round(this.anchorTokens + this.previousTokens + perUnit * this.window.max_units);
      }
    }
  }

  /** @returns {number} seconds until it is full, as things go; Infinity if that cannot be said */
  get fullInS() {
    if (this.window.mode === "context") return Math.max(0, this.window.max_units - this.units);
    if (this.growthTokens === 0) return Infinity;
    return Math.max(0, Math.ceil((this.limitTokens - this.contextTokens) / this.growthTokens));
  }
}
