// The model's sound on its way to the loudspeaker, through a jitter buffer; says where it is.
// Shown by tests/page/test_talk.py.

import { JitterBuffer } from "./jitter.js";
import { loudness } from "./pcm.js";
import { Resampler } from "./resampler.js";

const OUTPUT_HZ = 24000;
const REPORT_S = 0.1;

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.buffer = new JitterBuffer(sampleRate);
    this.resampler = new Resampler(OUTPUT_HZ, sampleRate);
    this.isOpen = true;
    this.level = 0;
    this.sinceReport = 0;
    this.port.onmessage = (message) => this.obey(message.data);
  }

  /** @param {{kind: string, item: string, samples: Float32Array, isDucked: boolean}} order */
  obey(order) {
    if (order.kind === "push") this.buffer.push(order.item, this.resampler.push(order.samples));
    else if (order.kind === "end") this.buffer.end(order.item);
    else if (order.kind === "cut") this.buffer.cut();
    else if (order.kind === "duck") this.buffer.duck(order.isDucked);
    else this.isOpen = false;
  }

  /** @param {Float32Array[][]} _ @param {Float32Array[][]} outputs @returns {boolean} */
  process(_, [[output]]) {
    this.buffer.read(output);
    this.level = Math.max(this.level, loudness(output));
    this.sinceReport += output.length;
    const happened = this.buffer.takeHappened();
    if (happened.length > 0 || this.sinceReport >= REPORT_S * sampleRate) this.report(happened);
    return this.isOpen;
  }

  /** @param {import("./jitter.js").Happened[]} happened */
  report(happened) {
    const { item, playedMs, bufferedMs, targetMs, numUnderruns, isPlaying } = this.buffer;
    this.port.postMessage({
      happened,
      item,
      playedMs,
      bufferedMs,
      targetMs,
      numUnderruns,
      isPlaying,
      level: this.level,
    });
    this.level = 0;
    this.sinceReport = 0;
  }
}

registerProcessor("playback", Playback);
