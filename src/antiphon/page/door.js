// Whether this server would take a call, and what it offers; or why not. Shown by tests/page/test_door.py.

const STORED_KEY = "antiphon.key";

/** @typedef {"full" | "key" | "wrongKey" | "origin" | "draining" | "loading" | "unreachable"} Closed */

export class ClosedError extends Error {
  /** @param {Closed} why @param {string} progress of loading */
  constructor(why, progress = "") {
    super(why);
    this.why = why;
    this.progress = progress;
  }
}

/** @returns {string} the key of this tab, "" for none */
export function key() {
  return sessionStorage.getItem(STORED_KEY) ?? "";
}

/** @param {string} value */
export function useKey(value) {
  sessionStorage.setItem(STORED_KEY, value);
}

/** Raises a ClosedError. @returns {Promise<import("./call/settings.js").Offer>} */
export async function knock() {
  let response;
  try {
    response = await fetch("/page/offer", { headers: key() === "" ? {} : { Authorization: `Bearer ${key()}` } });
  } catch {
    throw new ClosedError("unreachable");
  }
  const body = await response.json();
  if (response.ok) return body;
  switch (body.error.code) {
    case "invalid_api_key":
      throw new ClosedError(key() === "" ? "key" : "wrongKey");
    case "origin_not_allowed":
      throw new ClosedError("origin");
    case "draining":
      throw new ClosedError("draining");
    case "loading":
      throw new ClosedError("loading", body.error.message);
    default:
      throw new ClosedError("full");
  }
}
