// The operator's view: how a server stands, from /metrics and /ready, every two seconds.
// Shown by tests/page/test_ops.py.

import { LANGUAGES, preferred, t, use } from "./i18n.js";
import { Metrics } from "./metrics.js";
import { byId, make, write } from "./view/dom.js";
import { History, drawCalls } from "./view/calls.js";
import { drawHistogram } from "./view/histogram.js";

const PERIOD_MS = 2000;
const STATES = ["opening", "listening", "speaking"];

const HISTOGRAMS = [
  ["ops.first", "antiphon_first_audio_seconds", {}],
  ["ops.thinker", "antiphon_unit_seconds", { stage: "thinker" }],
  ["ops.talker", "antiphon_unit_seconds", { stage: "talker" }],
  ["ops.code2wav", "antiphon_unit_seconds", { stage: "code2wav" }],
  ["ops.lateness", "antiphon_speech_lateness_seconds", {}],
  ["ops.opening", "antiphon_opening_seconds", {}],
];

class Ops {
  constructor() {
    this.history = new History();
    this.metrics = new Metrics("");
    const languages = { en: "English", zh: "中文" };
    byId("language").append(
      ...Object.keys(LANGUAGES).map((name) => make("option", { value: name, lang: name }, [languages[name]])),
    );
    byId("language").addEventListener("change", () => this.speak(byId("language").value));
    addEventListener("resize", () => this.show());
    this.speak(preferred());
    void this.read();
  }

  /** @param {string} language */
  speak(language) {
    use(language);
    byId("language").value = language;
    this.show();
  }

  async read() {
    try {
      const [metrics, ready] = await Promise.all([fetch("/metrics"), fetch("/ready")]);
      this.metrics = new Metrics(await metrics.text());
      this.ready = await ready.json();
      this.history.add(STATES.map((state) => this.metrics.sum("antiphon_calls", { state })));
      this.show();
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      write(byId("ready"), t("ops.unreachable"));
    }
    setTimeout(() => void this.read(), PERIOD_MS);
  }

  show() {
    const { metrics } = this;
    if (this.ready !== undefined) {
      const reasons = this.ready.reasons.join("; ");
      write(byId("ready"), this.ready.status === "ready" ? t("ops.ready") : t("ops.notReady", { reasons }));
    }
    drawCalls(byId("calls"), this.history, this.ready?.calls?.most ?? 1);
    list("call-counts", [
      ...STATES.map((state) => [t(`ops.state.${state}`), count(metrics.sum("antiphon_calls", { state }))]),
      [t("ops.chats"), count(metrics.sum("antiphon_chats"))],
    ]);
    list("sessions", [
      [t("ops.ended"), count(metrics.sum("antiphon_calls_ended_total"))],
      [t("ops.units"), count(metrics.sum("antiphon_units_total"))],
      [t("ops.turns"), count(metrics.sum("antiphon_turns_total"))],
      [t("ops.interrupted"), count(metrics.sum("antiphon_interruptions_total"))],
      [t("ops.slides"), count(metrics.sum("antiphon_slides_total"))],
      [t("ops.misses"), count(metrics.sum("antiphon_deadline_misses_total"))],
      ...metrics
        .all("antiphon_stage_sessions")
        .map(({ labels, value }) => [t("ops.stage", { stage: labels.stage }), count(value)]),
    ]);
    this.showMemory();
    this.showFaults();
    list("traffic", [
      [t("ops.in"), bytes(metrics.sum("antiphon_websocket_bytes_total", { direction: "in" }))],
      [t("ops.out"), bytes(metrics.sum("antiphon_websocket_bytes_total", { direction: "out" }))],
    ]);
    byId("histograms").replaceChildren(
      ...HISTOGRAMS.map(([title, name, labels]) => drawHistogram(t(title), metrics.histogram(name, labels))),
    );
  }

  showMemory() {
    const { metrics } = this;
    const all = metrics.sum("antiphon_kv_blocks", { state: "all" });
    const used = all - metrics.sum("antiphon_kv_blocks", { state: "free" });
    const size = metrics.sum("antiphon_kv_block_bytes");
    byId("blocks").style.setProperty("width", `${all === 0 ? 0 : (100 * used) / all}%`);
    list("memory", [
      [t("ops.blocks"), t("ops.blocksIn", { used: count(used), all: count(all), bytes: bytes(used * size) })],
      [t("ops.promptBytes"), bytes(metrics.sum("antiphon_prompt_cache_bytes"))],
      [t("ops.voiceBytes"), bytes(metrics.sum("antiphon_voice_cache_bytes"))],
    ]);
    list("caches", [
      [t("ops.promptCache"), this.rate("antiphon_prompt_cache")],
      [t("ops.voiceCache"), this.rate("antiphon_voice_cache")],
    ]);
  }

  showFaults() {
    const { metrics } = this;
    const counted = ["antiphon_refusals_total", "antiphon_errors_total"].flatMap((name) => metrics.all(name));
    list(
      "refusals",
      counted.map(({ labels, value }) => [labels.code, count(value)]),
    );
    byId("no-refusals").hidden = counted.length > 0;
  }

  /** @param {string} cache @returns {string} */
  rate(cache) {
    const hits = this.metrics.sum(`${cache}_hits_total`);
    const asked = hits + this.metrics.sum(`${cache}_misses_total`);
    return asked === 0 ? "–" : t("ops.rate", { percent: Math.round((100 * hits) / asked), count: count(asked) });
  }
}

/** @param {string} id @param {string[][]} rows */
function list(id, rows) {
  byId(id).replaceChildren(
    ...rows.map(([name, value]) => make("div", {}, [make("dt", {}, [name]), make("dd", {}, [value])])),
  );
}

/** @param {number} value @returns {string} */
function count(value) {
  return value.toLocaleString(document.documentElement.lang);
}

/** @param {number} value @returns {string} */
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const place = Math.min(units.length - 1, value > 0 ? Math.floor(Math.log2(value) / 10) : 0);
  return `${(value / 1024 ** place).toLocaleString(document.documentElement.lang, { maximumFractionDigits: 1 })} ${units[place]}`;
}

new Ops();
