// What a caller may choose, as one table: a form is made from it, and what the server is told of a choice.
// Shown by tests/page/test_settings.py.
//
// when: "now" holds at once; "between" when no answer is being said; both may change during a call, unless the
// operator lets no call change, in which case "between" is before the call only.

/** @typedef {{instructions: string, voice: string, answers: "model" | "stopped" | "asked",
 *             windowMode: "off" | "basic" | "context", highTokens: number, lowTokens: number, maxUnits: number,
 *             previousTokens: number, listenScale: number, temperature: number, seed: string}} Choices
 *             voice: base64 of a sound file, "" for the server's own. seed: "" for one that is drawn. */
/** @typedef {{model: string, has_random_weights: boolean, instructions: string,
 *             window: import("./memory.js").Window, temperature: number, listen_scale: number,
 *             is_changeable: boolean, takes_pictures: boolean, resume_s: number}} Offer of the server */
/** @typedef {{name: keyof Choices, kind: "text" | "voice" | "choice" | "number" | "range" | "seed",
 *             when: "now" | "between", options?: string[], min?: number, max?: (offer: Offer) => number,
 *             step?: number, isShown?: (choices: Choices) => boolean}} Field */

/** @type {Field[]} */
export const FIELDS = [
  { name: "instructions", kind: "text", when: "between" },
  { name: "voice", kind: "voice", when: "between" },
  { name: "answers", kind: "choice", when: "now", options: ["model", "stopped", "asked"] },
  { name: "windowMode", kind: "choice", when: "between", options: ["off", "basic", "context"] },
  {
    name: "highTokens",
    kind: "number",
    when: "between",
    min: 1,
    max: (offer) => offer.window.high_tokens,
    isShown: (choices) => choices.windowMode === "basic",
  },
  {
    name: "lowTokens",
    kind: "number",
    when: "between",
    min: 0,
    max: (offer) => offer.window.low_tokens,
    isShown: (choices) => choices.windowMode === "basic",
  },
  {
    name: "maxUnits",
    kind: "number",
    when: "between",
    min: 1,
    max: (offer) => offer.window.max_units,
    isShown: (choices) => choices.windowMode === "context",
  },
  {
    name: "previousTokens",
    kind: "number",
    when: "between",
    min: 0,
    max: (offer) => offer.window.previous_max_tokens,
    isShown: (choices) => choices.windowMode === "context",
  },
  { name: "listenScale", kind: "range", when: "between", min: 0.5, max: () => 1.5, step: 0.05 },
  { name: "temperature", kind: "range", when: "between", min: 0, max: () => 1.5, step: 0.05 },
  { name: "seed", kind: "seed", when: "between" },
];

/** @param {Offer} offer @returns {Choices} what a call is if nobody chooses anything */
export function defaults(offer) {
  return {
    instructions: offer.instructions,
    voice: "",
    answers: "model",
    windowMode: offer.window.mode,
    highTokens: offer.window.high_tokens,
    lowTokens: offer.window.low_tokens,
    maxUnits: offer.window.max_units,
    previousTokens: offer.window.previous_max_tokens,
    listenScale: offer.listen_scale,
    temperature: offer.temperature,
    seed: "",
  };
}

/** Sets of choices with a name; what they do not say stays as it is. @type {Record<string, Partial<Choices>>} */
export const PRESETS = {
  standard: {},
  patient: { answers: "model", listenScale: 1.2 },
  lively: { answers: "model", listenScale: 0.85, temperature: 0.8 },
  takesTurns: { answers: "stopped" },
  remembersWords: { windowMode: "context" },
  repeatable: { temperature: 0, seed: "1" },
};

const DETECTION = {
  model: { type: "semantic_vad", create_response: true },
  stopped: { type: "server_vad", create_response: true, interrupt_response: true },
  asked: { type: "semantic_vad", create_response: false },
};

/** @param {Choices} choices @returns {object} the first session.update of a call */
export function wholeSession(choices) {
  const session = {
    type: "realtime",
    instructions: choices.instructions,
    audio: {
      input: { format: { type: "audio/pcm", rate: 16000 }, turn_detection: DETECTION[choices.answers] },
      output: { format: { type: "audio/pcm", rate: 24000 } },
    },
    temperature: choices.temperature,
    playback_commit_policy: "ack_only",
    extra_body: { ...windowOf(choices), listen_scale: choices.listenScale, report_units: true, ...seedOf(choices) },
  };
  return choices.voice === "" ? session : { ...session, ref_audio: choices.voice };
}

/** @param {Choices} before @param {Choices} after @returns {object} a session.update with what is different */
export function changedSession(before, after) {
  const session = { type: "realtime" };
  const extra = {};
  const isOther = (...names) => names.some((name) => before[name] !== after[name]);
  if (isOther("instructions")) session.instructions = after.instructions;
  if (isOther("voice") && after.voice !== "") session.ref_audio = after.voice;
  if (isOther("answers")) session.audio = { input: { turn_detection: DETECTION[after.answers] } };
  if (isOther("temperature")) session.temperature = after.temperature;
  if (isOther("windowMode", "highTokens", "lowTokens", "maxUnits", "previousTokens")) {
    Object.assign(extra, windowOf(after));
  }
  if (isOther("listenScale")) extra.listen_scale = after.listenScale;
  if (isOther("seed")) Object.assign(extra, seedOf(after));
  return Object.keys(extra).length === 0 ? session : { ...session, extra_body: extra };
}

/** Whether the call itself changes with it, and not only what is done around it. @param {Choices} before @param {Choices} after */
export function isCallChanged(before, after) {
  return FIELDS.some((field) => field.when === "between" && before[field.name] !== after[field.name]);
}

/** @param {Choices} choices @param {Offer} offer @returns {import("./memory.js").Window} as the server will have it */
export function windowFor(choices, offer) {
  return {
    mode: choices.windowMode,
    max_tokens: offer.window.max_tokens,
    high_tokens: choices.highTokens,
    low_tokens: choices.lowTokens,
    max_units: choices.maxUnits,
    previous_max_tokens: choices.previousTokens,
  };
}

/** Only what the mode knows, so that a limit of another mode cannot be wrong. @param {Choices} choices */
function windowOf(choices) {
  switch (choices.windowMode) {
    case "basic":
      return {
        sliding_window_mode: "basic",
        basic_window_high_tokens: choices.highTokens,
        basic_window_low_tokens: choices.lowTokens,
      };
    case "context":
      return {
        sliding_window_mode: "context",
        context_max_units: choices.maxUnits,
        context_previous_max_tokens: choices.previousTokens,
      };
    default:
      return { sliding_window_mode: "off" };
  }
}

/** @param {Choices} choices */
function seedOf(choices) {
  return choices.seed === "" ? {} : { seed: Number(choices.seed) };
}
