// Sound at one rate to sound at another, piece by piece: however the input is split, the output is the same.
// A windowed sinc, one row of taps for each phase. Shown by tests/page/test_sound.py.

/** Zero crossings of the sinc on each side; more is sharper and later. */
const NUM_CROSSINGS = 16;
/** Of the band that both rates have, what passes. */
const PASSED = 0.92;

/** @param {number} a @param {number} b @returns {number} */
function greatestDivisor(a, b) {
  return b === 0 ? a : greatestDivisor(b, a % b);
}

/** @param {number} x @returns {number} */
function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

/** Owns what it still needs of the past input. */
export class Resampler {
  /** @param {number} inputHz whole @param {number} outputHz whole */
  constructor(inputHz, outputHz) {
    const divisor = greatestDivisor(inputHz, outputHz);
    this.up = outputHz / divisor;
    this.down = inputHz / divisor;
    const cutoff = PASSED * Math.min(1, outputHz / inputHz);
    this.half = Math.ceil(NUM_CROSSINGS / cutoff);
    this.taps = this.up === this.down ? [] : this.rows(cutoff);
    this.past = new Float32Array(2 * this.half);
    // Of the next output: its place in the input, as whole samples from the start of `past` and a phase.
    this.place = this.half;
    this.phase = 0;
  }

  /** @param {number} cutoff of the input's band @returns {Float32Array[]} */
  rows(cutoff) {
    return Array.from({ length: this.up }, (_, phase) => {
      const row = new Float32Array(2 * this.half);
      let sum = 0;
      for (let tap = 0; tap < row.length; tap += 1) {
        const x = tap - this.half + 1 - phase / this.up;
        const window = Math.abs(x) < this.half ? Math.cos((Math.PI * x) / (2 * this.half)) ** 2 : 0;
        row[tap] = sinc(cutoff * x) * window;
        sum += row[tap];
      }
      return row.map((value) => value / sum);
    });
  }

  /** @param {Float32Array} samples @returns {Float32Array} all that can be said by now */
  push(samples) {
    if (this.up === this.down) return samples;
    const known = new Float32Array(this.past.length + samples.length);
    known.set(this.past);
    known.set(samples, this.past.length);
    const output = [];
    while (this.place + this.half < known.length) {
      const row = this.taps[this.phase];
      const first = this.place - this.half + 1;
      let sum = 0;
      for (let tap = 0; tap < row.length; tap += 1) sum += row[tap] * known[first + tap];
      output.push(sum);
      this.phase += this.down;
      this.place += Math.floor(this.phase / this.up);
      this.phase %= this.up;
    }
    const gone = Math.min(this.place - this.half, known.length);
    this.past = known.slice(gone);
    this.place -= gone;
    return Float32Array.from(output);
  }
}
