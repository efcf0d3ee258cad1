// The caller's sound on its way out: one channel, 16 kHz, in packets. Silence where nothing is connected, so that a
// call goes on also without a microphone.
// Shown by tests/page/test_talk.py.

import { Resampler } from "./resampler.js";
import { loudness, toPcm16 } from "./pcm.js";

export const INPUT_HZ = 16000;
const PACKET_SAMPLES = INPUT_HZ / 10;
const QUANTUM = 128;

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.resampler = new Resampler(sampleRate, INPUT_HZ);
    this.packet = new Float32Array(PACKET_SAMPLES);
    this.length = 0;
    this.isOpen = true;
    this.port.onmessage = () => {
      this.isOpen = false;
    };
  }

  /** @param {Float32Array[][]} inputs @returns {boolean} */
  process([channels]) {
    const samples = new Float32Array(QUANTUM);
    for (const channel of channels) channel.forEach((value, place) => (samples[place] += value / channels.length));
    for (const value of this.resampler.push(samples)) {
      this.packet[this.length] = value;
      this.length += 1;
      if (this.length === PACKET_SAMPLES) this.post();
    }
    return this.isOpen;
  }

  post() {
    this.length = 0;
    const pcm = toPcm16(this.packet);
    this.port.postMessage({ pcm, level: loudness(this.packet) }, [pcm.buffer]);
  }
}

registerProcessor("capture", Capture);
