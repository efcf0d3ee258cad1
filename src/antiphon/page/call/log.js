// Every event of a call, as lines of JSON; what is old rests in blobs, outside of the page's own memory.
// Shown by tests/page/test_saving.py.

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
    this.lines.push(`${JSON.stringify({ at_ms: Math.round(atMs), from, ...readable(event) })}\n`);
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

/** What would fill a log that people read: sound, pictures and voices, as their length. */
const LONG = ["audio", "delta", "ref_audio", "video_frames"];
const MAX_CHARACTERS = 1000;

/** @param {any} event @returns {object} as a log has it; what lets others into the call is left out */
function readable(event) {
  const { resume_token, ...short } = event;
  for (const name of LONG) {
    if (name in short && short[name].length > (name === "video_frames" ? 0 : MAX_CHARACTERS)) {
      short[name] = `(${short[name].length})`;
    }
  }
  return short.session?.ref_audio === undefined ? short : { ...short, session: readable(short.session) };
}
