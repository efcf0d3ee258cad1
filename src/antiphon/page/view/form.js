// The form of the settings, made from their table. Shown by tests/page/test_settings.py.

import { FIELDS, PRESETS, defaults } from "../call/settings.js";
import { VoiceRecording, MAX_VOICE_S, voiceOf } from "../call/voice.js";
import { t } from "../i18n.js";
import { make, mark, write } from "./dom.js";

const STORED = "antiphon.choices";
const RECORDING_MS = 250;

/** Owns the form, and what is chosen in it. `onChanged` is told of every choice. */
export class SettingsForm {
  /**
   * @param {HTMLElement} form @param {import("../call/settings.js").Offer} offer @param {() => void} onChanged
   * @param {() => void} onApply the choices shall hold for the call that goes on
   */
  constructor(form, offer, onChanged, onApply) {
    this.form = form;
    this.offer = offer;
    this.onChanged = onChanged;
    this.onApply = onApply;
    /** @type {import("../call/settings.js").Choices} */
    this.choices = { ...defaults(offer), ...stored(offer) };
    /** The chosen voice as it can be heard here; null for the server's. @type {{address: string, name: string} | null} */
    this.voice = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.apply.hidden) this.onApply();
    });
    this.build();
  }

  /** Anew, in the language of the page. */
  build() {
    this.rows = FIELDS.map((field) => ({ field, ...this.row(field) }));
    this.apply = make("button", { type: "submit", id: "apply", hidden: "" }, [t("settings.apply")]);
    this.said = make("p", { class: "quiet", role: "status", id: "settings-said" }, [t("settings.before")]);
    this.form.replaceChildren(this.said, this.presetRow(), ...this.rows.map(({ element }) => element), this.apply);
    this.show();
  }

  /** Let the form look like what is chosen. */
  show() {
    for (const { field, element, input, value } of this.rows) {
      element.hidden = field.isShown !== undefined && !field.isShown(this.choices);
      if (input !== null && document.activeElement !== input) input.value = String(this.choices[field.name]);
      if (value !== null) write(value, String(this.choices[field.name]));
    }
  }

  /**
   * Say where things stand. @param {boolean} isInCall @param {boolean} isDifferent from what holds in the call
   * @param {import("../call/call.js").ChangeState | null} change
   */
  tell(isInCall, isDifferent, change) {
    const isOffered = isInCall && isDifferent && change?.kind !== "asked";
    if (this.apply.hidden === isOffered) this.apply.hidden = !isOffered;
    if (change !== null && !isDifferent) write(this.said, t(`settings.${change.kind}`, { message: change.message }));
    else if (change?.kind === "refused") write(this.said, t("settings.refused", { message: change.message }));
    else write(this.said, t(isInCall ? "settings.between" : "settings.before"));
    const isFixed = isInCall && !this.offer.is_changeable;
    for (const { field, input, when } of this.rows) {
      if (input !== null) input.disabled = isFixed && field.when === "between";
      // What is said of all of them is not said of each.
      const isSpecial = isInCall && (isFixed || field.when === "now");
      write(when, isSpecial ? t(field.when === "now" ? "settings.now" : "settings.fixed") : "");
      when.hidden = !isSpecial;
    }
  }

  /** @param {Partial<import("../call/settings.js").Choices>} some */
  choose(some) {
    this.choices = { ...this.choices, ...some };
    keep(this.choices, this.offer);
    this.show();
    this.onChanged();
  }

  presetRow() {
    const select = make("select", { id: "preset" }, [
      make("option", { value: "" }, ["–"]),
      ...Object.keys(PRESETS).map((name) => make("option", { value: name }, [t(`preset.${name}`)])),
    ]);
    select.addEventListener("change", () => {
      if (select.value !== "")
        this.choose({ ...defaults(this.offer), voice: this.choices.voice, ...PRESETS[select.value] });
    });
    return make("label", {}, [make("span", {}, [t("settings.preset")]), select]);
  }

  /** @param {import("../call/settings.js").Field} field */
  row(field) {
    const when = make("small", { class: "quiet", hidden: "" });
    if (field.kind === "voice") return { element: this.voiceRow(when), input: null, value: null, when };
    const input = this.input(field);
    const value = field.kind === "range" ? make("output", { class: "value", for: `field-${field.name}` }) : null;
    const name = make("span", {}, [t(`field.${field.name}`)]);
    return { element: make("label", {}, [name, ...(value === null ? [] : [value]), input, when]), input, value, when };
  }

  /** @param {import("../call/settings.js").Field} field @returns {HTMLInputElement} */
  input(field) {
    const id = `field-${field.name}`;
    let input;
    if (field.kind === "choice") {
      input = make(
        "select",
        { id },
        field.options.map((name) => make("option", { value: name }, [t(`field.${field.name}.${name}`)])),
      );
    } else if (field.kind === "text") {
      input = make("textarea", { id, rows: "4" });
    } else if (field.kind === "seed") {
      input = make("input", { id, type: "number", min: "0", step: "1", placeholder: t("field.seed.hint") });
    } else {
      const limits = { min: String(field.min), max: String(field.max(this.offer)), step: String(field.step ?? 1) };
      input = make("input", { id, type: field.kind, required: "", ...limits });
    }
    input.addEventListener("input", () => {
      if (!input.checkValidity()) return;
      const isNumber = field.kind === "number" || field.kind === "range";
      this.choose({ [field.name]: isNumber ? Number(input.value) : input.value });
    });
    return input;
  }

  /** @param {HTMLElement} when */
  voiceRow(when) {
    const name = make("p", { class: "quiet", id: "voice-name" });
    const label = t("voice.upload");
    const file = make("input", {
      type: "file",
      id: "voice-file",
      accept: "audio/*,.flac",
      "aria-label": label,
      hidden: "",
    });
    const upload = make("button", { type: "button", class: "small" }, [label]);
    const record = make("button", { type: "button", class: "small", id: "voice-record" }, [t("voice.record")]);
    const own = make("button", { type: "button", class: "small", id: "voice-own" }, [t("voice.own")]);
    const listen = make("audio", { controls: "", "aria-label": t("voice.listen") });
    const show = () => {
      write(name, this.voice?.name ?? t("voice.server"));
      listen.hidden = own.hidden = this.voice === null;
      if (this.voice !== null) listen.src = this.voice.address;
    };
    const take = async (blob, called) => {
      this.forgetVoice();
      this.voice = { address: URL.createObjectURL(blob), name: called };
      show();
      this.choose({ voice: await voiceOf(blob) });
    };
    upload.addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      if (file.files.length > 0) void take(file.files[0], file.files[0].name);
    });
    own.addEventListener("click", () => {
      this.forgetVoice();
      show();
      this.choose({ voice: "" });
    });
    this.listenTo(record, name, take);
    show();
    return make("div", { role: "group", "aria-label": t("field.voice") }, [
      make("span", {}, [t("field.voice")]),
      name,
      make("div", { class: "tools" }, [upload, record, own]),
      file,
      listen,
      when,
    ]);
  }

  forgetVoice() {
    if (this.voice !== null) URL.revokeObjectURL(this.voice.address);
    this.voice = null;
  }

  /** @param {HTMLElement} button @param {HTMLElement} name @param {(blob: Blob, label: string) => Promise<void>} take */
  listenTo(button, name, take) {
    /** @type {VoiceRecording | null} */
    let recording = null;
    let timer = 0;
    const stop = async () => {
      clearInterval(timer);
      const made = recording;
      recording = null;
      mark(button, "aria-pressed", "false");
      write(button, t("voice.record"));
      await take(await made.stop(), t("voice.recorded"));
    };
    button.addEventListener("click", async () => {
      if (recording !== null) return stop();
      try {
        recording = await VoiceRecording.start();
      } catch {
        write(name, t("problem.denied"));
        return undefined;
      }
      mark(button, "aria-pressed", "true");
      timer = setInterval(() => {
        write(button, t("voice.stop", { seconds: Math.floor(recording.seconds) }));
        if (recording.seconds >= MAX_VOICE_S) void stop();
      }, RECORDING_MS);
      return undefined;
    });
  }
}

/** Remember what is not as everybody has it; a voice is not kept. @param {import("../call/settings.js").Choices} choices
 *  @param {import("../call/settings.js").Offer} offer */
function keep(choices, offer) {
  const usual = defaults(offer);
  const own = Object.entries(choices).filter(([name, value]) => name !== "voice" && value !== usual[name]);
  localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(own)));
}

/** What was chosen before, as far as this server has it. @param {import("../call/settings.js").Offer} offer
 *  @returns {Partial<import("../call/settings.js").Choices>} */
function stored(offer) {
  const kept = JSON.parse(localStorage.getItem(STORED) ?? "{}");
  const fitting = FIELDS.filter(
    ({ name, options, max }) =>
      name in kept &&
      (options === undefined || options.includes(kept[name])) &&
      (max === undefined || kept[name] <= max(offer)),
  );
  return Object.fromEntries(fitting.map(({ name }) => [name, kept[name]]));
}
