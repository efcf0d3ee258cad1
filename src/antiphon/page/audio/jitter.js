// What is played next: sound that comes in pieces, at uneven times, as one stream without clicks.
// Times are samples of the output; nothing here knows of workers or of the page. Shown by tests/page/test_sound.py.
//
//     push() ──> [ piece | piece | end ] ──> read()         waiting ── so long, or all is there ──> playing
//                                                              ^                                     │
//                                                              └──────── nothing is there ───────────┘
//
// A second of an answer comes at once, and the next one when it is made. So what helps is to begin later, not to have
// more: playing waits for a time, which grows by how late sound was.

export const FIRST_TARGET_MS = 80;
export const MAX_TARGET_MS = 600;
const TARGET_STEP_MS = 60;
/** So long without an underrun, and it waits a little less. */
const CALM_S = 30;
const FADE_MS = 8;
/** From the order to be silent to silence. */
const CUT_MS = 25;
const DUCKED = 0.25;

/** @typedef {{item: string, samples: Float32Array, isEnd: boolean}} Piece */
/** @typedef {{kind: "started" | "ended" | "cut", item: string, playedMs: number}
 *          | {kind: "underrun", item: string, playedMs: number, lateMs: number}} Happened */

/** Owns the sound that waits to be played, and how long it waits. */
export class JitterBuffer {
  /** @param {number} rateHz of everything that comes in and goes out */
  constructor(rateHz) {
    this.rateHz = rateHz;
    this.targetMs = FIRST_TARGET_MS;
    this.numUnderruns = 0;
    /** @type {Piece[]} */
    this.pieces = [];
    this.numWaiting = 0;
    this.isPlaying = false;
    this.isCutting = false;
    this.isDucked = false;
    this.item = "";
    this.numPlayed = 0;
    this.gain = 0;
    this.calmSamples = 0;
    this.waitedSamples = 0;
    /** It has played all that there was of an answer that goes on, and since then silence. */
    this.isDry = false;
    this.drySamples = 0;
    /** @type {Happened[]} */
    this.happened = [];
  }

  /** @param {string} item whose sound it is @param {Float32Array} samples */
  push(item, samples) {
    if (samples.length === 0) return;
    if (this.isCutting) this.finishCut();
    this.pieces.push({ item, samples, isEnd: false });
    this.numWaiting += samples.length;
  }

  /** No more comes of `item`. @param {string} item */
  end(item) {
    if (!this.isCutting) this.pieces.push({ item, samples: new Float32Array(0), isEnd: true });
  }

  /** Be silent, and forget what waits. */
  cut() {
    if (this.isPlaying) this.isCutting = true;
    else if (this.item !== "") this.finishCut();
    else this.dropAll();
  }

  /** Be quieter while somebody else may want to speak. @param {boolean} isDucked */
  duck(isDucked) {
    this.isDucked = isDucked;
  }

  get bufferedMs() {
    return (1000 * this.numWaiting) / this.rateHz;
  }

  get playedMs() {
    return (1000 * this.numPlayed) / this.rateHz;
  }

  /** @param {Float32Array} output is filled */
  read(output) {
    output.fill(0);
    if (!this.isPlaying) this.wait(output.length);
    for (let place = 0; this.isPlaying && place < output.length;) place += this.play(output, place);
    if (this.isPlaying) this.grow(output.length);
  }

  /** @returns {Happened[]} since this was asked last */
  takeHappened() {
    const happened = this.happened;
    this.happened = [];
    return happened;
  }

  /** @param {number} numSamples of silence that would be played */
  wait(numSamples) {
    if (this.pieces.length === 0) {
      if (this.isDry) this.drySamples += numSamples;
      return;
    }
    if (this.isDry) this.wet();
    const waitedMs = (1000 * this.waitedSamples) / this.rateHz;
    if (waitedMs >= this.targetMs || this.pieces.some((piece) => piece.isEnd)) this.start();
    else this.waitedSamples += numSamples;
  }

  /** Something came after silence: sound, which was late, or only the news that there is none. */
  wet() {
    this.isDry = false;
    if (this.pieces[0].isEnd) return;
    const lateMs = (1000 * this.drySamples) / this.rateHz;
    this.numUnderruns += 1;
    this.calmSamples = 0;
    this.targetMs = Math.min(MAX_TARGET_MS, this.targetMs + Math.max(TARGET_STEP_MS, lateMs));
    this.happened.push({ kind: "underrun", item: this.item, playedMs: this.playedMs, lateMs });
  }

  start() {
    this.waitedSamples = 0;
    this.isPlaying = true;
    this.gain = 0;
    if (this.pieces[0].item !== this.item) {
      this.item = this.pieces[0].item;
      this.numPlayed = 0;
      this.tell("started");
    }
  }

  /** Play from the first piece. @param {Float32Array} output @param {number} place @returns {number} of samples */
  play(output, place) {
    const piece = this.pieces[0];
    if (piece === undefined) return this.runDry();
    if (piece.item !== this.item) {
      this.item = piece.item;
      this.numPlayed = 0;
      this.tell("started");
    }
    if (piece.isEnd) {
      this.pieces.shift();
      this.tell("ended");
      this.item = "";
      this.isPlaying = this.pieces.length > 0;
      return 0;
    }
    const length = Math.min(piece.samples.length, output.length - place);
    for (let sample = 0; sample < length; sample += 1) {
      this.fade(this.numWaiting - sample);
      output[place + sample] = this.gain * piece.samples[sample];
    }
    this.numWaiting -= length;
    this.numPlayed += length;
    if (length === piece.samples.length) this.pieces.shift();
    else piece.samples = piece.samples.subarray(length);
    if (this.isCutting && this.gain === 0) this.finishCut();
    return length;
  }

  /** One step of the gain to where it should be. @param {number} numLeft samples that are there */
  fade(numLeft) {
    const fadeSamples = (FADE_MS * this.rateHz) / 1000;
    let wanted = this.isDucked ? DUCKED : 1;
    if (this.isCutting || numLeft <= fadeSamples) wanted = 0;
    const step = 1000 / ((this.isCutting ? CUT_MS : FADE_MS) * this.rateHz);
    this.gain = wanted > this.gain ? Math.min(wanted, this.gain + step) : Math.max(wanted, this.gain - step);
  }

  runDry() {
    this.isPlaying = false;
    if (this.isCutting) {
      this.finishCut();
      return 0;
    }
    this.isDry = true;
    this.drySamples = 0;
    return 0;
  }

  finishCut() {
    this.tell("cut");
    this.dropAll();
  }

  dropAll() {
    this.pieces = [];
    this.numWaiting = 0;
    this.isPlaying = false;
    this.isCutting = false;
    this.isDry = false;
    this.waitedSamples = 0;
    this.item = "";
  }

  /** @param {number} numSamples that were played without a gap */
  grow(numSamples) {
    this.calmSamples += numSamples;
    if (this.calmSamples < CALM_S * this.rateHz) return;
    this.calmSamples = 0;
    this.targetMs = Math.max(FIRST_TARGET_MS, this.targetMs - TARGET_STEP_MS);
  }

  /** @param {"started" | "ended" | "cut"} kind */
  tell(kind) {
    this.happened.push({ kind, item: this.item, playedMs: this.playedMs });
  }
}
