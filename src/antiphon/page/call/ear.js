// When the caller speaks, for the time line and for ducking: louder than the room, which is learned. Only the page's
// own opinion; who answers is decided by the server. Shown by tests/page/test_history.py.

const START_RATIO = 3;
const MIN_LEVEL = 0.006;
const STOP_PACKETS = 4;
const FALL = 0.3;
const RISE = 0.002;

/** Owns what the room sounds like. For packets of 100 ms. */
export class Ear {
  constructor() {
    this.room = MIN_LEVEL / START_RATIO;
    this.quietPackets = STOP_PACKETS;
  }

  /** @param {number} level root mean square of a packet @returns {boolean} whether the caller speaks */
  hear(level) {
    // It falls fast, in every pause, and rises slowly, so that speech does not become the room and a fan does.
    this.room += (level < this.room ? FALL : RISE) * (level - this.room);
    const isLoud = level > Math.max(MIN_LEVEL, START_RATIO * this.room);
    this.quietPackets = isLoud ? 0 : Math.min(STOP_PACKETS, this.quietPackets + 1);
    return this.quietPackets < STOP_PACKETS;
  }
}
