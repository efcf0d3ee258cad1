// A socket of /v1/realtime that survives being cut: what was said while it was away is said afterwards, in order, once.
//
//     connecting ──> open <──> away (tries again) ──> over
//
// Messages are counted on both sides. What the server has not confirmed is kept, and sent again from where it stopped.
// Shown by tests/page/test_connection.py.

const HEARTBEAT_MS = 2000;
/** An attempt to come back that takes longer is given up for another one. */
const ATTEMPT_MS = 4000;
/** Nothing came for so long: the network is gone, whatever the socket says. */
const SILENCE_MS = 8000;
const FIRST_RETRY_MS = 250;
const MAX_RETRY_MS = 2000;
/** Kept for a server that takes nothing; more is lost, and the call is over. */
const MAX_KEPT_BYTES = 16 * 2 ** 20;

/** @typedef {"connecting" | "open" | "away" | "over"} State */
/** @typedef {{onEvent: (event: any) => void, onState: (state: State, reason: string) => void,
 *             onRoundTrip: (ms: number) => void}} Listeners */

/** Owns the socket, and what was sent and not confirmed. */
export class Connection {
  /** @param {URL} address @param {string} key "" for none @param {number} resumeS @param {Listeners} listeners */
  constructor(address, key, resumeS, listeners) {
    this.address = address;
    this.protocols = key === "" ? ["realtime"] : ["realtime", `openai-insecure-api-key.${key}`];
    this.resumeMs = 1000 * resumeS;
    this.listeners = listeners;
    /** @type {State} */
    this.state = "connecting";
    /** @type {WebSocket | null} */
    this.socket = null;
    /** @type {string[]} */
    this.kept = [];
    this.numKeptBytes = 0;
    /** Messages before those that are kept. */
    this.numConfirmed = 0;
    this.lastSeq = 0;
    this.sessionId = "";
    this.token = "";
    this.retryMs = FIRST_RETRY_MS;
    this.heartbeatAt = 0;
    this.heardAt = 0;
    this.awaySince = 0;
    this.attemptAt = 0;
    this.connect(false);
    this.timer = setInterval(() => this.beat(), HEARTBEAT_MS);
  }

  /** Say something, now or when the server is there again. @param {object} event */
  send(event) {
    if (this.state === "over") return;
    const text = JSON.stringify(event);
    this.kept.push(text);
    this.numKeptBytes += text.length;
    if (this.numKeptBytes > MAX_KEPT_BYTES) this.end("lost");
    else if (this.state === "open") this.socket.send(text);
  }

  /** Hang up. */
  close() {
    this.send({ type: "session.close" });
    this.end("closed");
  }

  /** @param {boolean} isResuming */
  connect(isResuming) {
    const address = new URL(this.address);
    address.searchParams.set(isResuming ? "resume" : "vendor_events", "1");
    const socket = new WebSocket(address, this.protocols);
    this.socket = socket;
    this.attemptAt = performance.now();
    socket.onopen = () => {
      if (isResuming && socket === this.socket) socket.send(this.resumption());
    };
    socket.onmessage = (message) => {
      if (socket === this.socket) this.hear(JSON.parse(message.data));
    };
    socket.onclose = () => {
      if (socket !== this.socket) return;
      this.socket = null;
      this.lose();
    };
  }

  resumption() {
    return JSON.stringify({
      type: "session.resume",
      session_id: this.sessionId,
      resume_token: this.token,
      last_received_server_event_seq: this.lastSeq,
    });
  }

  /** @param {any} event */
  hear(event) {
    this.heardAt = performance.now();
    if (event.server_event_seq !== undefined) {
      if (event.server_event_seq <= this.lastSeq) return;
      this.lastSeq = event.server_event_seq;
    }
    if (event.type === "session.created") {
      this.sessionId = event.session.id;
      this.token = event.resume_token;
      this.enter("open", "");
    } else if (event.type === "session.resumed") {
      this.token = event.resume_token;
      this.confirm(event.received_client_events);
      for (const text of this.kept) this.socket.send(text);
      this.enter("open", "");
    } else if (event.type === "session.heartbeat_ack") {
      this.confirm(event.received_client_events);
      if (this.heartbeatAt > 0) this.listeners.onRoundTrip(this.heardAt - this.heartbeatAt);
      this.heartbeatAt = 0;
    }
    this.listeners.onEvent(event);
    const ending = endOf(event);
    if (ending !== "") this.end(ending);
  }

  /** The server has taken so many messages. @param {number} numTaken */
  confirm(numTaken) {
    const gone = this.kept.splice(0, numTaken - this.numConfirmed);
    this.numConfirmed += gone.length;
    for (const text of gone) this.numKeptBytes -= text.length;
  }

  /** The socket is gone. */
  lose() {
    const now = performance.now();
    if (this.state === "connecting") {
      this.end("refused");
      return;
    }
    if (this.state === "over") return;
    if (this.state === "open") {
      this.awaySince = now;
      this.retryMs = FIRST_RETRY_MS;
      this.heartbeatAt = 0;
      this.enter("away", "");
    }
    if (now - this.awaySince > this.resumeMs) {
      this.end("lost");
      return;
    }
    setTimeout(() => {
      if (this.state === "away") this.connect(true);
    }, this.retryMs);
    this.retryMs = Math.min(MAX_RETRY_MS, 2 * this.retryMs);
  }

  beat() {
    const now = performance.now();
    const isSilent = this.state === "open" && now - this.heardAt > SILENCE_MS;
    const isStuck = this.state === "away" && this.socket !== null && now - this.attemptAt > ATTEMPT_MS;
    if (isSilent || isStuck) {
      const silent = this.socket;
      this.socket = null;
      silent?.close();
      this.lose();
      return;
    }
    if (this.state !== "open") return;
    // One at a time, so that its answer is its own.
    if (this.heartbeatAt === 0) {
      this.heartbeatAt = performance.now();
      this.send({ type: "session.heartbeat" });
      this.send({ type: "session.event_ack", server_event_seq: this.lastSeq });
    }
  }

  /** @param {string} reason */
  end(reason) {
    if (this.state === "over") return;
    clearInterval(this.timer);
    this.enter("over", reason);
    this.socket?.close();
    this.kept = [];
  }

  /** @param {State} state @param {string} reason */
  enter(state, reason) {
    this.state = state;
    this.listeners.onState(state, reason);
  }
}

/** Codes of errors with which a session is over. */
const ENDING = new Set([
  "idle_timeout",
  "prompt_too_long",
  "resource_exhausted",
  "context_length_exceeded",
  "engine_stopped",
  "shape_error",
  "internal_error",
]);
/** Codes of errors with which the server knows nothing of the session that the page comes back to. */
const FORGOTTEN = new Set(["config_timeout", "unknown_session", "invalid_resume_token", "invalid_session_resume"]);

/** @param {any} event @returns {string} why nothing more will come, or "" */
function endOf(event) {
  switch (event.type) {
    case "session.closed":
      return "closed";
    case "session.replaced":
      return "replaced";
    case "session.expired":
      return "idle_timeout";
    case "session.resync_required":
      return "lost";
    case "error":
      if (FORGOTTEN.has(event.error.code)) return "lost";
      return ENDING.has(event.error.code) ? event.error.code : "";
    default:
      return "";
  }
}
