// The page: one call at a time, from the button to the files that are saved. What is shown follows the call.
// Shown by tests/page/test_talk.py and the others there.

import { Call } from "./call/call.js";
import { History } from "./call/history.js";
import { Camera } from "./camera.js";
import { ClosedError, key, knock, useKey } from "./door.js";
import { LANGUAGES, preferred, t, use } from "./i18n.js";
import { Captions } from "./view/captions.js";
import { listDevices } from "./view/devices.js";
import { byId, make, mark, write } from "./view/dom.js";
import { showFigures } from "./view/figures.js";
import { SettingsForm } from "./view/form.js";
import { showGauge } from "./view/gauge.js";
import { listenForSaving } from "./view/saving.js";
import { Timeline } from "./view/timeline.js";

const REALTIME = "/v1/realtime";
const RETRY_MS = 1000;
/** Problems that pass by themselves, so that the page asks again. */
const PASSING = new Set(["loading", "unreachable"]);
/** Of the drawing, where nobody wants motion. */
const CALM_MS = 1000;
/** Levels are roots of powers, so that quiet speech is seen. */
const LOUDEST = 0.25;
const ENDS = [
  "closed",
  "lost",
  "refused",
  "replaced",
  "idle_timeout",
  "resource_exhausted",
  "prompt_too_long",
  "context_length_exceeded",
  "engine_stopped",
];

class App {
  constructor() {
    /** @type {Call | null} the one that goes on, or the last one */
    this.call = null;
    /** @type {SettingsForm | null} */
    this.form = null;
    /** @type {Camera | null} */
    this.camera = null;
    this.isStarting = false;
    this.isMuted = false;
    this.isDirty = true;
    this.drawnAt = 0;
    this.emptiness = new History();
    this.problem = "";
    this.captions = new Captions(byId("captions"));
    this.timeline = new Timeline(byId("timeline"), () => {
      this.isDirty = true;
    });
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)");
    this.listen();
    this.speak(preferred());
    void this.knock();
    requestAnimationFrame(() => this.draw());
  }

  get isInCall() {
    return this.call !== null && this.call.phase !== "over";
  }

  /** @returns {"idle" | import("./call/call.js").Phase} */
  get phase() {
    if (this.isStarting && !this.isInCall) return "connecting";
    return this.call === null ? "idle" : this.call.phase;
  }

  listen() {
    const languages = { en: "English", zh: "中文" };
    byId("language").append(
      ...Object.keys(LANGUAGES).map((name) => make("option", { value: name, lang: name }, [languages[name]])),
    );
    byId("language").addEventListener("change", () => this.speak(byId("language").value));
    byId("call").addEventListener("click", () => (this.isInCall ? this.call.hangUp() : void this.start(true)));
    byId("without").addEventListener("click", () => void this.start(false));
    byId("retry").addEventListener("click", () => void this.knock());
    byId("interrupt").addEventListener("click", () => this.call.interrupt());
    byId("answer").addEventListener("click", () => this.call.askForAnswer());
    byId("mute").addEventListener("click", () => this.mute());
    byId("camera").addEventListener("click", () => void this.look("camera"));
    byId("screen").addEventListener("click", () => void this.look("screen"));
    byId("line-nearer").addEventListener("click", () => this.timeline.zoom(0.5));
    byId("line-farther").addEventListener("click", () => this.timeline.zoom(2));
    byId("line-live").addEventListener("click", () => this.timeline.follow());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useKey(byId("key").value.trim());
      void this.knock();
    });
    byId("type-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.type();
    });
    byId("file-button").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => {
      if (byId("file").files.length > 0) void this.playFile(byId("file").files[0]);
      byId("file").value = "";
    });
    byId("volume").addEventListener("input", () => this.call?.sound.setVolume(Number(byId("volume").value)));
    byId("microphone").addEventListener("change", () => void this.useMicrophone());
    byId("speaker").addEventListener("change", () => void this.call?.sound.useSpeaker(byId("speaker").value));
    navigator.mediaDevices?.addEventListener("devicechange", () => void listDevices());
    // A server would keep the place for who might come back.
    addEventListener("pagehide", () => this.call?.hangUp());
    this.listenForKeys();
    this.listenForFiles();
    listenForSaving(() => this.call);
  }

  listenForKeys() {
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isInCall) this.call.interrupt();
      const isTaken = event.target.closest("input, textarea, select, button, summary, a, audio, [tabindex]") !== null;
      if (isTaken || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
      if (event.key === " ") byId("call").click();
      else if (event.key === "m") byId("mute").click();
      else return;
      event.preventDefault();
    });
  }

  listenForFiles() {
    const isFile = (event) => event.dataTransfer?.types.includes("Files") && this.isInCall;
    document.addEventListener("dragover", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      byId("drop").hidden = false;
    });
    document.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) byId("drop").hidden = true;
    });
    document.addEventListener("drop", (event) => {
      byId("drop").hidden = true;
      if (!isFile(event)) return;
      event.preventDefault();
      void this.playFile(event.dataTransfer.files[0]);
    });
  }

  /** @param {string} language */
  speak(language) {
    use(language);
    byId("language").value = language;
    this.form?.build();
    void listDevices();
    this.showProblem(this.problem);
    this.isDirty = true;
  }

  /** Ask whether a call would be taken, and for what there is to choose. @returns {Promise<boolean>} */
  async knock() {
    try {
      const offer = await knock();
      this.offer = offer;
      write(byId("model"), offer.model);
      byId("noise").hidden = !offer.has_random_weights;
      this.form ??= new SettingsForm(
        byId("settings-form"),
        offer,
        () => {
          this.isDirty = true;
        },
        () => this.call.changeTo(this.form.choices),
      );
      this.showProblem("");
      return true;
    } catch (error) {
      if (!(error instanceof ClosedError)) throw error;
      this.showProblem(error.why, error.progress);
      if (PASSING.has(error.why)) setTimeout(() => void this.knock(), RETRY_MS);
      return false;
    } finally {
      this.isDirty = true;
    }
  }

  /** @param {boolean} withMicrophone */
  async start(withMicrophone) {
    if (this.isStarting || this.isInCall) return;
    if (!isSecureContext || !("AudioWorkletNode" in window)) {
      this.showProblem(isSecureContext ? "old" : "insecure");
      return;
    }
    this.isStarting = true;
    this.isDirty = true;
    try {
      if (!(await this.knock())) return;
      const call = new Call(this.offer, this.form.choices, key());
      if (withMicrophone && !(await this.openMicrophone(call))) {
        void call.sound.close();
        return;
      }
      this.begin(call);
      await call.start(new URL(REALTIME, location.href.replace(/^http/, "ws")));
      if (withMicrophone) call.sound.connectMicrophone();
      call.sound.setVolume(Number(byId("volume").value));
      await call.sound.useSpeaker(byId("speaker").value);
      void listDevices();
    } catch (error) {
      // The server went away before the worklets came from it.
      if (!(error instanceof DOMException)) throw error;
      this.call?.enter("over", "refused");
    } finally {
      this.isStarting = false;
      this.isDirty = true;
    }
  }

  /** @param {Call} call @returns {Promise<boolean>} */
  async openMicrophone(call) {
    try {
      await call.sound.openMicrophone(byId("microphone").value);
      return true;
    } catch (error) {
      this.showProblem(reasonOf(error));
      return false;
    }
  }

  /** @param {Call} call is the page's from now on */
  begin(call) {
    this.call = call;
    this.isMuted = false;
    this.captions.clear();
    this.timeline.follow();
    call.addEventListener("changed", () => {
      this.isDirty = true;
    });
    call.addEventListener("over", () => this.finish(call));
    call.addEventListener("turn", (event) => this.captions.add(event.detail));
    call.addEventListener("typed", (event) => this.captions.add(event.detail));
  }

  /** @param {Call} call that is over */
  finish(call) {
    this.stopLooking();
    // What is saved of a call stays; a server that took none may say why.
    if (call.endReason === "refused") void this.knock();
  }

  mute() {
    if (!this.isInCall) return;
    this.isMuted = !this.isMuted;
    this.call.sound.mute(this.isMuted);
    this.isDirty = true;
  }

  async useMicrophone() {
    if (!this.isInCall) return;
    if (await this.openMicrophone(this.call)) this.call.sound.connectMicrophone();
    this.call.sound.mute(this.isMuted);
  }

  /** @param {"camera" | "screen"} kind is shown from now on, or not any more */
  async look(kind) {
    const before = this.camera?.kind;
    this.stopLooking();
    if (before === kind || !this.isInCall) return;
    try {
      const onPicture = (picture) => this.call.show(picture);
      byId("pictures").hidden = false;
      this.camera = await Camera.start(kind, byId("preview"), onPicture, () => this.stopLooking());
      this.showProblem("");
    } catch {
      byId("pictures").hidden = true;
      this.showProblem("camera");
    }
    this.isDirty = true;
  }

  stopLooking() {
    this.camera?.stop();
    this.camera = null;
    byId("pictures").hidden = true;
    this.isDirty = true;
  }

  type() {
    const text = byId("typed").value.trim();
    if (text === "" || !this.isInCall) return;
    this.call.type(text);
    byId("typed").value = "";
  }

  /** @param {File} file that is heard instead of the microphone, once */
  async playFile(file) {
    try {
      await this.call.sound.useFile(await file.arrayBuffer());
      this.call.noteFile(t("file.said", { name: file.name }));
      this.showProblem("");
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      this.showProblem("file");
    }
  }

  /** @param {string} name "" for none @param {string} progress of loading */
  showProblem(name, progress = "") {
    this.problem = name;
    byId("problem").hidden = name === "";
    byId("key-form").hidden = name !== "key" && name !== "wrongKey";
    byId("without").hidden = !["denied", "missing", "busy"].includes(name);
    byId("retry").hidden = !["full", "draining"].includes(name);
    if (name === "") return;
    write(byId("problem-title"), t(`problem.${name}`));
    write(byId("problem-do"), t(`problem.${name}.do`, { progress }));
  }

  draw() {
    requestAnimationFrame(() => this.draw());
    const now = performance.now();
    const isMoving = this.isInCall && (!this.isCalm.matches || now - this.drawnAt > CALM_MS);
    if (!this.isDirty && !isMoving) return;
    if (this.isDirty) this.show();
    this.isDirty = false;
    this.drawnAt = now;
    this.timeline.draw(
      this.call?.history ?? this.emptiness,
      this.isInCall ? this.call.nowMs : (this.call?.endedMs ?? 0),
    );
  }

  show() {
    const phase = this.phase;
    mark(document.body, "data-phase", phase);
    const isBlocked = phase === "idle" && this.problem !== "";
    write(byId("state"), t(isBlocked ? "state.blocked" : `state.${phase}`));
    write(byId("hint"), phase === "over" ? this.ending() : isBlocked ? "" : t(`hint.${phase}`));
    this.showControls(phase);
    byId("captions-empty").hidden = byId("captions").childElementCount > 0;
    byId("line-live").disabled = this.timeline.isLive;
    if (this.call === null) return;
    this.captions.update();
    showGauge(this.call.memory);
    showFigures(this.call.figures, this.call.memory.numSlides, this.call.numInterruptions);
    this.showLevels();
    write(byId("num-pictures"), t("pictures", { count: this.call.numPictures }));
    this.form?.tell(
      this.isInCall,
      JSON.stringify(this.form.choices) !== JSON.stringify(this.call.choices),
      this.call.change,
    );
  }

  /** @param {string} phase */
  showControls(phase) {
    const isOn = this.isInCall && phase !== "connecting";
    const button = byId("call");
    write(button, t(this.isInCall ? "call.stop" : phase === "over" ? "call.again" : "call.start"));
    button.disabled = !this.isInCall && (this.isStarting || this.form === null || PASSING.has(this.problem));
    byId("interrupt").disabled = !(isOn && (this.call.isModelSpeaking || this.call.responseId !== ""));
    byId("answer").hidden = !(isOn && this.call.choices.answers === "asked");
    for (const id of ["mute", "typed", "type-send", "file-button"]) byId(id).disabled = !isOn;
    for (const kind of ["camera", "screen"]) {
      byId(kind).disabled = !isOn || !this.offer.takes_pictures;
      mark(byId(kind), "aria-pressed", String(this.camera?.kind === kind));
    }
    mark(byId("mute"), "aria-pressed", String(this.isMuted));
    byId("save-audio").disabled = this.call === null || this.call.recorder.seconds === 0;
    for (const id of ["save-text", "save-vtt", "save-log"]) byId(id).disabled = this.call === null;
  }

  showLevels() {
    const scaled = (level) => Math.min(1, Math.sqrt(level / LOUDEST));
    const [caller, model] = this.isInCall ? [scaled(this.call.level), scaled(this.call.modelLevel)] : [0, 0];
    byId("level-caller").value = caller;
    byId("level-model").value = model;
    const level = this.call.isModelSpeaking ? model : caller;
    byId("voice-ring").style.setProperty("--level", level.toFixed(2));
  }

  /** @returns {string} why the call is over */
  ending() {
    const reason = ENDS.includes(this.call.endReason) ? this.call.endReason : "fault";
    return `${t(`end.${reason}`)} ${t("hint.over")}`;
  }
}

/** @param {unknown} error of getUserMedia @returns {string} */
function reasonOf(error) {
  if (!(error instanceof DOMException)) throw error;
  if (error.name === "NotFoundError" || error.name === "OverconstrainedError") return "missing";
  return error.name === "NotReadableError" ? "busy" : "denied";
}

new App();
