// The buttons that save a call. Shown by tests/page/test_talk.py.

import { asText, asVtt } from "../call/saving.js";
import { t } from "../i18n.js";
import { byId, download } from "./dom.js";

/** @param {() => import("../call/call.js").Call} callOf the page, the last one or the one that goes on */
export function listenForSaving(callOf) {
  const nameOf = (who) => t(`who.${who}`);
  const text = (words, type) => new Blob([words], { type: `${type};charset=utf-8` });
  const turns = () => callOf().transcript.turns;
  byId("save-audio").addEventListener("click", () => download(callOf().recorder.blob(), "call.wav"));
  byId("save-text").addEventListener("click", () => download(text(asText(turns(), nameOf), "text/plain"), "call.txt"));
  byId("save-vtt").addEventListener("click", () => download(text(asVtt(turns(), nameOf), "text/vtt"), "call.vtt"));
  byId("save-log").addEventListener("click", () => download(callOf().log.blob(), "call.jsonl"));
}
