// Both sides of the call as they were heard here, on one clock: caller left, model right, 24 kHz, 16 bits.
// Shown by tests/page/test_talk.py.

import { toPcm16 } from "./pcm.js";
import { Resampler } from "./resampler.js";

const RECORD_HZ = 24000;
const PIECE_SAMPLES = RECORD_HZ / 2;
const QUANTUM = 128;

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.sides = [0, 1].map(() => new Resampler(sampleRate, RECORD_HZ));
    this.piece = new Float32Array(2 * PIECE_SAMPLES);
    this.length = 0;
    this.isOpen = true;
    this.port.onmessage = () => {
      this.isOpen = false;
    };
  }

  /** @param {Float32Array[][]} inputs @returns {boolean} */
  process(inputs) {
    const [left, right] = this.sides.map((side, place) => side.push(inputs[place][0] ?? new Float32Array(QUANTUM)));
    for (let sample = 0; sample < left.length; sample += 1) {
      this.piece[2 * this.length] = left[sample];
      this.piece[2 * this.length + 1] = right[sample];
      this.length += 1;
      if (this.length === PIECE_SAMPLES) this.post();
    }
    return this.isOpen;
  }

  post() {
    this.length = 0;
    const pcm = toPcm16(this.piece);
    this.port.postMessage(pcm, [pcm.buffer]);
  }
}

registerProcessor("recorder", Recorder);
