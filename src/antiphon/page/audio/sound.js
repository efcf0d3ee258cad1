// The page's sound: one AudioContext with what the caller says, what the model says, and a recording of both.
//
//     microphone or file ──> capture ──> packets            playback ──> volume ──> loudspeaker
//             └────────────────────────> recorder <─────────────┘
//
// Shown by tests/page/test_talk.py.

/** @typedef {{pcm: Int16Array, level: number}} Packet */
/** @typedef {{happened: import("./jitter.js").Happened[], item: string, playedMs: number, bufferedMs: number,
 *             targetMs: number, numUnderruns: number, isPlaying: boolean, level: number}} Report */

const FADE_MS = 100;
const WORKLETS = ["capture", "playback", "recorder"];

/** Owns the AudioContext of one call, and the microphone. */
export class Sound {
  /**
   * @param {{onPacket: (packet: Packet) => void, onReport: (report: Report) => void,
   *          onRecorded: (pcm: Int16Array) => void}} listeners
   */
  constructor(listeners) {
    this.listeners = listeners;
    this.context = new AudioContext({ latencyHint: "interactive" });
    this.volume = this.context.createGain();
    this.volume.connect(this.context.destination);
    /** @type {MediaStream | null} */
    this.microphone = null;
    /** @type {AudioNode | null} */
    this.source = null;
  }

  /** Load the worklets and connect them; the context starts with the press of a button. */
  async start() {
    const address = (name) => new URL(`${name}-worklet.js`, import.meta.url);
    await Promise.all(WORKLETS.map((name) => this.context.audioWorklet.addModule(address(name))));
    await this.context.resume();
    const oneWay = { numberOfInputs: 1, numberOfOutputs: 0 };
    this.capture = new AudioWorkletNode(this.context, "capture", oneWay);
    this.playback = new AudioWorkletNode(this.context, "playback", {
      numberOfInputs: 0,
      numberOfOutputs: 1,
      outputChannelCount: [1],
    });
    this.recorder = new AudioWorkletNode(this.context, "recorder", { numberOfInputs: 2, numberOfOutputs: 0 });
    this.playback.connect(this.volume);
    this.playback.connect(this.recorder, 0, 1);
    this.capture.port.onmessage = (message) => this.listeners.onPacket(message.data);
    this.playback.port.onmessage = (message) => this.listeners.onReport(message.data);
    this.recorder.port.onmessage = (message) => this.listeners.onRecorded(message.data);
  }

  /** Have a microphone, and not hear it yet. Raises a DOMException if it may not.
   *  @param {string} deviceId "" for the system's choice */
  async openMicrophone(deviceId) {
    const wanted = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };
    const device = deviceId === "" ? {} : { deviceId: { exact: deviceId } };
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { ...wanted, ...device } });
    this.releaseMicrophone();
    this.microphone = stream;
  }

  /** Hear it, if there is one. */
  connectMicrophone() {
    if (this.microphone !== null) this.connect(this.context.createMediaStreamSource(this.microphone));
  }

  /** Hear a recording instead, once. Raises a DOMException if it is none. @param {ArrayBuffer} file */
  async useFile(file) {
    const source = this.context.createBufferSource();
    source.buffer = await this.context.decodeAudioData(file);
    source.onended = () => {
      if (this.source !== source) return;
      source.disconnect();
      this.source = null;
      this.connectMicrophone();
    };
    this.connect(source);
    source.start();
  }

  /** @param {AudioNode} source whose sound the caller's is from now on */
  connect(source) {
    this.source?.disconnect();
    this.source = source;
    source.connect(this.capture);
    source.connect(this.recorder, 0, 0);
  }

  /** @param {boolean} isMuted */
  mute(isMuted) {
    for (const track of this.microphone?.getAudioTracks() ?? []) track.enabled = !isMuted;
  }

  /** @param {string} item @param {Float32Array} samples 24 kHz */
  play(item, samples) {
    this.playback.port.postMessage({ kind: "push", item, samples }, [samples.buffer]);
  }

  /** No more comes of an item. @param {string} item */
  endItem(item) {
    this.playback.port.postMessage({ kind: "end", item });
  }

  cut() {
    this.playback.port.postMessage({ kind: "cut" });
  }

  /** @param {boolean} isDucked */
  duck(isDucked) {
    this.playback.port.postMessage({ kind: "duck", isDucked });
  }

  /** @param {number} volume 0 to 1 */
  setVolume(volume) {
    this.volume.gain.setTargetAtTime(volume, this.context.currentTime, 0.02);
  }

  /** Where the browser can. @param {string} deviceId "" for the system's choice */
  async useSpeaker(deviceId) {
    if ("setSinkId" in this.context) await this.context.setSinkId(deviceId);
  }

  releaseMicrophone() {
    for (const track of this.microphone?.getTracks() ?? []) track.stop();
    this.microphone = null;
  }

  /** Fade out, and give everything back. */
  async close() {
    this.releaseMicrophone();
    this.setVolume(0);
    await new Promise((faded) => setTimeout(faded, FADE_MS));
    for (const node of [this.capture, this.playback, this.recorder]) node?.port.postMessage({ kind: "close" });
    await this.context.close();
  }
}

/** @param {"audioinput" | "audiooutput"} kind @returns {Promise<MediaDeviceInfo[]>} those that have a name by now */
export async function devices(kind) {
  const found = await navigator.mediaDevices.enumerateDevices();
  return found.filter((device) => device.kind === kind && device.deviceId !== "" && device.deviceId !== "default");
}
