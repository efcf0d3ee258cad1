// Every event of a call, as lines of JSON; what is old rests in blobs, outside of the page's own memory.

const LINES_IN_MEMORY = 500;

/** Owns the lines. */
export class EventLog {
  constructor() {
    /** @type {Blob[]} */
    this.rested = [];
    /** @type {string[]} */
    this.lines = [];
  }

  /** @param {number} atMs of the call @param {"server" | "client" | "page"} from @param {object} event */
  add(atMs, from, event) {
    this.lines.push(`${JSON.stringify({ at_ms: Math.round(atMs), from, ...withoutSound(event) })}\n`);
    if (this.lines.length >= LINES_IN_MEMORY) this.rest();
  }

  /** @returns {Blob} all of it */
  blob() {
    return new Blob([...this.rested, ...this.lines], { type: "application/x-ndjson" });
  }

  rest() {
    this.rested.push(new Blob(this.lines));
    this.lines = [];
  }
}

/** Sound and pictures as their length, so that a log can be read. @param {object} event @returns {object} */
function withoutSound(event) {
  const short = { ...event };
  for (const name of ["audio", "delta"]) {
    if (typeof short[name] === "string" && String(short.type).includes("audio") && !String(short.type).includes("transcript")) {
      short[`${name}_characters`] = short[name].length;
      delete short[name];
    }
  }
  if (short.video_frames) short.video_frames = short.video_frames.length;
  return short;
}
