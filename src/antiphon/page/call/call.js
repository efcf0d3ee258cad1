// One call: its connection, its sound, and all that is known of it. No view: who shows it listens to `changed`.
//
//     Sound ── packets ──> Connection ──> server         server ── events ──> Call ──> Sound, Transcript, History, …
//
// Shown by tests/page/test_talk.py.

import { pcm16FromBase64, pcm16ToBase64, toFloats } from "../audio/pcm.js";
import { Sound } from "../audio/sound.js";
import { Connection } from "./connection.js";
import { Ear } from "./ear.js";
import { Figures } from "./figures.js";
import { History } from "./history.js";
import { EventLog } from "./log.js";
import { Memory } from "./memory.js";
import { CallRecorder } from "./recorder.js";
import { changedSession, isCallChanged, wholeSession, windowFor } from "./settings.js";
import { Transcript } from "./transcript.js";

const ACK_MS = 500;
/** The caller speaks for so long while the model does, and the model is heard more quietly. */
const DUCK_PACKETS = 2;

/** @typedef {"connecting" | "listening" | "speaking" | "away" | "over"} Phase */
/** @typedef {{kind: "asked" | "held" | "refused", message: string}} ChangeState */

/** Owns a call from the press of a button to its end. `changed` tells that something of it is different. */
export class Call extends EventTarget {
  /**
   * @param {import("./settings.js").Offer} offer @param {import("./settings.js").Choices} choices
   * @param {string} key of the server, "" for none
   */
  constructor(offer, choices, key) {
    super();
    this.offer = offer;
    this.choices = choices;
    this.key = key;
    this.startedAt = performance.now();
    /** @type {Phase} */
    this.phase = "connecting";
    this.endReason = "";
    this.endedMs = 0;
    this.endMessage = "";
    this.level = 0;
    this.modelLevel = 0;
    this.isCallerSpeaking = false;
    this.isModelSpeaking = false;
    this.numInterruptions = 0;
    this.numPictures = 0;
    this.history = new History();
    this.transcript = new Transcript();
    this.memory = new Memory(windowFor(choices, offer));
    this.figures = new Figures();
    this.log = new EventLog();
    this.recorder = new CallRecorder();
    /** @type {ChangeState | null} of the last change that was asked for */
    this.change = null;
    this.ear = new Ear();
    this.sound = new Sound({
      onPacket: (packet) => this.sendPacket(packet),
      onReport: (report) => this.follow(report),
      onRecorded: (pcm) => this.recorder.add(pcm),
    });
    /** The answer that is told at the moment, and the item that it is spoken as. */
    this.responseId = "";
    this.itemId = "";
    /** Items whose sound is not wanted any more. @type {Set<string>} */
    this.cutItems = new Set();
    this.ackedMs = 0;
    this.loudPackets = 0;
    /** Changes that the server has been asked for. @type {{id: string, before: any, after: any}[]} */
    this.pending = [];
    this.numChanges = 0;
    /** @type {string[]} pictures that go with the next packet */
    this.pictures = [];
  }

  get nowMs() {
    return performance.now() - this.startedAt;
  }

  /** Load the sound, then call. @param {URL} address of the realtime route */
  async start(address) {
    await this.sound.start();
    this.connection = new Connection(address, this.key, this.offer.resume_s, {
      onEvent: (event) => this.hear(event),
      onState: (state, reason) => this.enter(state, reason),
      onRoundTrip: (ms) => {
        this.figures.roundTripMs = ms;
      },
    });
  }

  /** Stop the model. */
  interrupt() {
    if (this.responseId === "" && !this.isModelSpeaking) return;
    this.send({ type: "barge_in" });
    this.silence();
  }

  /** @param {string} text that the model reads with the next second */
  type(text) {
    this.send({ type: "input.text.append", text });
    this.tell("typed", this.transcript.begin("caller", `typed-${this.nowMs}`, text, this.nowMs));
    this.history.mark("typed", this.nowMs);
  }

  /** A recording is heard from now on. @param {string} text that tells it */
  noteFile(text) {
    this.tell("typed", this.transcript.begin("caller", `file-${this.nowMs}`, text, this.nowMs));
  }

  /** Have an answer, also where the model would not begin one. */
  askForAnswer() {
    this.send({ type: "response.create" });
  }

  /** @param {string} picture base64 of a JPEG; it goes with the next packet, unless the network is away */
  show(picture) {
    if (this.phase === "away") return;
    this.pictures = [picture];
  }

  /** @param {import("./settings.js").Choices} choices to go on with */
  changeTo(choices) {
    const session = changedSession(this.choices, choices);
    this.numChanges += 1;
    const id = `change_${this.numChanges}`;
    this.pending.push({ id, before: this.choices, after: choices });
    this.choices = choices;
    this.change = { kind: "asked", message: "" };
    this.send({ type: "session.update", event_id: id, session });
    this.notify();
  }

  hangUp() {
    this.connection?.close();
  }

  /** @param {object} event */
  send(event) {
    this.log.add(this.nowMs, "client", event);
    this.connection.send(event);
  }

  /** @param {import("../audio/sound.js").Packet} packet */
  sendPacket(packet) {
    if (this.phase === "over") return;
    this.level = packet.level;
    const isSpeaking = this.ear.hear(packet.level);
    if (this.isCallerSpeaking && !isSpeaking) this.figures.fallSilent(this.nowMs);
    if (!this.isCallerSpeaking && isSpeaking) this.figures.speakAgain();
    this.isCallerSpeaking = isSpeaking;
    this.history.caller.set(isSpeaking, this.nowMs);
    this.loudPackets = isSpeaking && this.isModelSpeaking ? this.loudPackets + 1 : 0;
    this.sound.duck(this.loudPackets >= DUCK_PACKETS);
    if (this.phase === "connecting") return;
    const append = { type: "input_audio_buffer.append", audio: pcm16ToBase64(packet.pcm) };
    if (this.pictures.length > 0) {
      append.video_frames = this.pictures;
      this.numPictures += this.pictures.length;
      this.pictures = [];
      this.log.add(this.nowMs, "client", append);
    }
    // Ten a second and all alike: the log has them only where they carry a picture.
    this.connection.send(append);
  }

  /** @param {any} event of the server */
  hear(event) {
    this.log.add(this.nowMs, "server", event);
    this.memory.hear(event);
    this.figures.hear(event);
    switch (event.type) {
      case "session.created":
        this.send({ type: "session.update", session: wholeSession(this.choices) });
        break;
      case "response.created":
        this.responseId = event.response.id;
        break;
      case "response.output_item.added":
        this.itemId = event.item.id;
        // Nothing comes of an item behind the start of the next one.
        this.cutItems.clear();
        this.tell("turn", this.transcript.begin("model", event.item.id, "", this.nowMs));
        break;
      case "response.output_audio_transcript.delta":
        this.transcript.say(event.item_id, event.delta);
        break;
      case "response.output_audio.delta":
        this.play(event);
        break;
      case "response.done":
        this.finish(event.response);
        break;
      case "session.window_slid":
        this.history.mark("slide", this.nowMs);
        break;
      case "session.call_changed":
        this.settle("held", "");
        break;
      case "session.updated":
        this.settleAtOnce();
        break;
      case "error":
        this.fail(event.error);
        break;
    }
    this.notify();
  }

  /** @param {any} delta */
  play(delta) {
    if (this.cutItems.has(delta.item_id)) return;
    const marks = delta.metadata.audio_text_marks;
    this.transcript.mark(
      delta.item_id,
      marks.map((mark) => ({ numCharacters: mark.text_chars, endMs: mark.audio_end_ms })),
    );
    this.sound.play(delta.item_id, toFloats(pcm16FromBase64(delta.delta)));
  }

  /** @param {any} response that is done */
  finish(response) {
    this.responseId = "";
    const item = response.output.length > 0 ? response.output[0].id : "";
    if (item === "") return;
    if (response.status === "completed" || response.status === "incomplete") this.sound.endItem(item);
    else if (!this.cutItems.has(item)) this.silence();
  }

  /** Nothing more of the present answer is heard. */
  silence() {
    this.numInterruptions += 1;
    this.history.mark("interruption", this.nowMs);
    if (this.itemId !== "") this.cutItems.add(this.itemId);
    this.sound.cut();
    if (!this.isModelSpeaking) this.transcript.end(this.itemId, true);
  }

  /** Where the loudspeaker is. @param {import("../audio/sound.js").Report} report */
  follow(report) {
    if (this.phase === "over") return;
    this.modelLevel = report.level;
    this.figures.play(report);
    if (report.isPlaying) this.transcript.play(report.item, report.playedMs, this.nowMs);
    for (const happened of report.happened) this.note(happened);
    // Where its sound comes late, it speaks all the same.
    this.isModelSpeaking = report.item !== "";
    this.history.model.set(report.isPlaying, this.nowMs);
    if (report.isPlaying && Math.abs(report.playedMs - this.ackedMs) >= ACK_MS)
      this.acknowledge(report.item, report.playedMs, false);
    if (this.phase === "listening" || this.phase === "speaking") {
      this.phase = this.isModelSpeaking ? "speaking" : "listening";
    }
    this.notify();
  }

  /** @param {import("../audio/jitter.js").Happened} happened */
  note(happened) {
    switch (happened.kind) {
      case "started":
        this.ackedMs = 0;
        this.figures.beginHearing(this.nowMs);
        break;
      case "underrun":
        this.history.mark("underrun", this.nowMs - happened.lateMs);
        this.log.add(this.nowMs, "page", { type: "underrun", late_ms: Math.round(happened.lateMs) });
        break;
      case "ended":
      case "cut":
        this.transcript.play(happened.item, happened.playedMs, this.nowMs);
        this.acknowledge(happened.item, happened.playedMs, happened.kind === "cut");
        this.tell("turnover", this.transcript.end(happened.item, happened.kind === "cut"));
        break;
    }
  }

  /** Let the server know what was heard. @param {string} item @param {number} playedMs @param {boolean} isCut */
  acknowledge(item, playedMs, isCut) {
    this.ackedMs = playedMs;
    this.send({ type: "playback.ack", item_id: item, played_ms: Math.floor(playedMs), truncate: isCut });
  }

  /** What the last change wanted holds, or cannot be had. @param {"held" | "refused"} kind @param {string} message */
  settle(kind, message) {
    const settled = this.pending.splice(0);
    if (settled.length === 0) return;
    const last = settled[settled.length - 1];
    if (kind === "held") {
      const isPromptSame = settled.every(
        ({ before, after }) => before.instructions === after.instructions && before.voice === after.voice,
      );
      this.memory.change(windowFor(last.after, this.offer), isPromptSame);
      this.history.mark("change", this.nowMs);
    } else {
      this.choices = settled[0].before;
    }
    this.change = { kind, message };
  }

  /** Of a change that is none of the call, `session.updated` is all that is said. */
  settleAtOnce() {
    if (this.pending.length > 0 && this.pending.every(({ before, after }) => !isCallChanged(before, after))) {
      this.settle("held", "");
    }
  }

  /** @param {any} error */
  fail(error) {
    if (this.pending.some(({ id }) => id === error.event_id)) this.settle("refused", error.message);
    this.endMessage = error.message;
    this.tell("fault", error);
  }

  /** @param {import("./connection.js").State} state @param {string} reason */
  enter(state, reason) {
    this.log.add(this.nowMs, "page", { type: `connection.${state}`, reason });
    if (state === "away") this.history.mark("cut", this.nowMs);
    if (state === "open") this.phase = this.isModelSpeaking ? "speaking" : "listening";
    if (state === "away") this.phase = "away";
    if (state === "over") {
      this.phase = "over";
      this.endReason = reason;
      this.endedMs = this.nowMs;
      this.isModelSpeaking = false;
      this.isCallerSpeaking = false;
      this.history.caller.set(false, this.nowMs);
      this.history.model.set(false, this.nowMs);
      for (const id of [...this.transcript.open.keys()]) this.transcript.end(id, true);
      void this.sound.close();
      this.tell("over", null);
    }
    this.notify();
  }

  notify() {
    this.dispatchEvent(new Event("changed"));
  }

  /** @param {string} kind @param {unknown} detail */
  tell(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }
}
