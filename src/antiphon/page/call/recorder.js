// The call as it was heard here: stereo, caller left and model right, in blobs that rest outside of the page's memory.
// Shown by tests/page/test_saving.py.

import { HEADER_BYTES, wavHeader } from "../audio/wav.js";

export const RECORD_HZ = 24000;
const BYTES_PER_SAMPLE = 4;
const PIECES_IN_MEMORY = 20;
/** What a WAV file can say of itself. */
const MAX_BYTES = 2 ** 32 - HEADER_BYTES;

/** Owns the recording. */
export class CallRecorder {
  constructor() {
    /** @type {Blob[]} */
    this.rested = [];
    /** @type {Int16Array[]} */
    this.pieces = [];
    this.numBytes = 0;
  }

  /** @param {Int16Array} pcm both sides, sample by sample in turn; what a file cannot hold is left out */
  add(pcm) {
    if (this.numBytes + pcm.byteLength > MAX_BYTES) return;
    this.numBytes += pcm.byteLength;
    this.pieces.push(pcm);
    if (this.pieces.length < PIECES_IN_MEMORY) return;
    this.rested.push(new Blob(this.pieces));
    this.pieces = [];
  }

  get seconds() {
    return this.numBytes / BYTES_PER_SAMPLE / RECORD_HZ;
  }

  /** @returns {Blob} a WAV file */
  blob() {
    return new Blob([wavHeader(this.numBytes, 2, RECORD_HZ), ...this.rested, ...this.pieces], { type: "audio/wav" });
  }
}
