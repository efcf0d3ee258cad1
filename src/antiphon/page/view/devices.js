// Which microphones and loudspeakers there are to choose from. Shown by tests/page/test_access.py.

import { devices } from "../audio/sound.js";
import { t } from "../i18n.js";
import { byId, make } from "./dom.js";

/** Names are known to a page only once it has heard a microphone. */
export async function listDevices() {
  if (navigator.mediaDevices === undefined) return;
  await list("microphone", "audioinput");
  await list("speaker", "audiooutput");
}

/** @param {string} id of the choice @param {"audioinput" | "audiooutput"} kind */
async function list(id, kind) {
  const select = byId(id);
  const chosen = select.value;
  const named = (await devices(kind)).map((device) => make("option", { value: device.deviceId }, [device.label]));
  select.replaceChildren(make("option", { value: "" }, [t("device.system")]), ...named);
  select.value = named.some((option) => option.value === chosen) ? chosen : "";
}
