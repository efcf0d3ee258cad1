// A voice for the model to speak with: from a file, or recorded here. Shown by tests/page/test_settings.py.

import { toBase64 } from "../audio/pcm.js";
import { wavHeader } from "../audio/wav.js";

export const MAX_VOICE_S = 30;
const VOICE_HZ = 16000;

/** @param {Blob} file @returns {Promise<string>} base64, as the server takes it */
export async function voiceOf(file) {
  return toBase64(new Uint8Array(await file.arrayBuffer()));
}

/** Owns a microphone and what was said into it. */
export class VoiceRecording {
  /** Raises a DOMException if there is no microphone, or it may not be used. @returns {Promise<VoiceRecording>} */
  static async start() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const context = new AudioContext();
    await context.audioWorklet.addModule(new URL("../audio/capture-worklet.js", import.meta.url));
    return new VoiceRecording(stream, context);
  }

  /** @param {MediaStream} stream @param {AudioContext} context that knows the capture worklet */
  constructor(stream, context) {
    this.stream = stream;
    this.context = context;
    /** @type {Int16Array[]} */
    this.packets = [];
    this.node = new AudioWorkletNode(context, "capture", { numberOfInputs: 1, numberOfOutputs: 0 });
    this.node.port.onmessage = (message) => {
      if (this.seconds < MAX_VOICE_S) this.packets.push(message.data.pcm);
    };
    context.createMediaStreamSource(stream).connect(this.node);
  }

  get seconds() {
    return this.packets.reduce((sum, packet) => sum + packet.length, 0) / VOICE_HZ;
  }

  /** @returns {Promise<Blob>} a WAV file */
  async stop() {
    for (const track of this.stream.getTracks()) track.stop();
    await this.context.close();
    return new Blob([wavHeader(2 * VOICE_HZ * this.seconds, 1, VOICE_HZ), ...this.packets], { type: "audio/wav" });
  }
}
