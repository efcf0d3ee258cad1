// How quick the call is, in numbers that a listener would measure, and what the server says that it took.
// Shown by tests/page/test_memory.py.

/** Owns the numbers of the panel; NaN for what is not known yet. */
export class Figures {
  constructor() {
    this.unitMs = NaN;
    this.slowestUnitMs = NaN;
    this.firstAudioMs = NaN;
    this.roundTripMs = NaN;
    this.leadMs = NaN;
    this.targetMs = NaN;
    this.numUnderruns = 0;
    this.openingMs = NaN;
    /** @type {boolean | null} null before the call is open */
    this.isPromptHit = null;
    this.silentSinceMs = NaN;
    this.isAwaiting = false;
  }

  /** @param {any} event of the server */
  hear(event) {
    if (event.type === "session.opened") {
      this.openingMs = event.opening_ms;
      this.isPromptHit = event.is_prompt_shared;
    } else if (event.type === "session.unit_finished") {
      this.unitMs = event.thinker_ms + event.talker_ms + event.code2wav_ms;
      this.slowestUnitMs = Math.max(this.unitMs, Number.isNaN(this.slowestUnitMs) ? 0 : this.slowestUnitMs);
    }
  }

  /** The caller stopped speaking. @param {number} nowMs */
  fallSilent(nowMs) {
    this.silentSinceMs = nowMs;
    this.isAwaiting = true;
  }

  /** The caller goes on speaking; whatever is heard now is no answer to the last pause. */
  speakAgain() {
    this.isAwaiting = false;
  }

  /** An answer is heard from now on. @param {number} nowMs */
  beginHearing(nowMs) {
    // Of an answer that nobody waited for, there is no time to tell.
    if (this.isAwaiting) this.firstAudioMs = nowMs - this.silentSinceMs;
    this.isAwaiting = false;
  }

  /** @param {import("../audio/sound.js").Report} report */
  play(report) {
    this.leadMs = report.bufferedMs;
    this.targetMs = report.targetMs;
    this.numUnderruns = report.numUnderruns;
  }
}
