// The time line of a call: two lanes and marks on a canvas, at any moment and at any scale. It draws what is visible
// and nothing else, so that an hour costs what a minute does. Shown by tests/page/test_history.py.

const MIN_SPAN_MS = 10000;
const MAX_SPAN_MS = 3600000;
const FIRST_SPAN_MS = 60000;
/** Of the visible time, how much a key moves. */
const STEP = 0.25;
const AXIS_HEIGHT = 20;
const LANE_GAP = 8;
const RADIUS = 4;
const MIN_WIDTH = 2;
const TICK_PIXELS = 90;
const TICKS_MS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900].map((seconds) => 1000 * seconds);

/** Owns what part of the time is visible. */
export class Timeline {
  /** @param {HTMLCanvasElement} canvas @param {() => void} onMoved the visible part is another one */
  constructor(canvas, onMoved) {
    this.canvas = canvas;
    this.onMoved = onMoved;
    this.spanMs = FIRST_SPAN_MS;
    /** @type {number} of the call; Infinity follows the call */
    this.endMs = Infinity;
    this.nowMs = 0;
    this.colors = readColors(canvas);
    canvas.addEventListener("keydown", (event) => this.steer(event));
    canvas.addEventListener("wheel", (event) => this.turn(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons === 1) this.moveBy((-event.movementX * this.spanMs) / canvas.clientWidth);
    });
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
      matchMedia(query).addEventListener("change", () => {
        this.colors = readColors(canvas);
        this.onMoved();
      });
    }
  }

  get isLive() {
    return this.endMs === Infinity;
  }

  follow() {
    this.endMs = Infinity;
    this.onMoved();
  }

  /** @param {import("../call/history.js").History} history @param {number} nowMs of the call */
  draw(history, nowMs) {
    this.nowMs = nowMs;
    const { width, height, pen } = this.prepare();
    const endMs = this.isLive ? Math.max(nowMs, this.spanMs) : this.endMs;
    const startMs = endMs - this.spanMs;
    const toX = (ms) => ((ms - startMs) / this.spanMs) * width;
    const laneHeight = (height - AXIS_HEIGHT - 3 * LANE_GAP) / 2;
    const tops = [LANE_GAP, 2 * LANE_GAP + laneHeight];
    pen.clearRect(0, 0, width, height);
    this.drawAxis(pen, startMs, endMs, toX, height);
    [history.caller, history.model].forEach((lane, place) => {
      pen.fillStyle = this.colors.rail;
      pen.fillRect(0, tops[place] + laneHeight / 2 - 1, Math.min(width, toX(nowMs)), 2);
      pen.fillStyle = place === 0 ? this.colors.caller : this.colors.model;
      for (const span of lane.within(startMs, endMs)) {
        const x = toX(span.startMs);
        pen.beginPath();
        pen.roundRect(x, tops[place], Math.max(MIN_WIDTH, toX(span.endMs) - x), laneHeight, RADIUS);
        pen.fill();
      }
    });
    for (const mark of history.marksWithin(startMs, endMs)) this.drawMark(pen, mark, toX(mark.atMs), tops, laneHeight);
  }

  /** A canvas as fine as the screen. */
  prepare() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return { width, height, pen };
  }

  /** @param {CanvasRenderingContext2D} pen @param {number} startMs @param {number} endMs
   *  @param {(ms: number) => number} toX @param {number} height */
  drawAxis(pen, startMs, endMs, toX, height) {
    const wanted = (this.spanMs * TICK_PIXELS) / Math.max(1, this.canvas.clientWidth);
    const tickMs = TICKS_MS.find((tick) => tick >= wanted) ?? TICKS_MS[TICKS_MS.length - 1];
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "bottom";
    for (let ms = Math.max(0, Math.ceil(startMs / tickMs) * tickMs); ms <= endMs; ms += tickMs) {
      const x = toX(ms);
      pen.fillStyle = this.colors.rail;
      pen.fillRect(x, LANE_GAP, 1, height - AXIS_HEIGHT - LANE_GAP);
      pen.fillStyle = this.colors.text;
      pen.fillText(clockOf(ms), x + 3, height - 3);
    }
  }

  /** @param {CanvasRenderingContext2D} pen @param {import("../call/history.js").Mark} mark @param {number} x
   *  @param {number[]} tops of the lanes @param {number} laneHeight */
  drawMark(pen, mark, x, tops, laneHeight) {
    const [top, bottom] = [tops[0], tops[1] + laneHeight];
    pen.fillStyle = this.colors[mark.kind];
    pen.strokeStyle = this.colors[mark.kind];
    pen.lineWidth = 1.5;
    pen.setLineDash(mark.kind === "slide" || mark.kind === "typed" ? [3, 3] : []);
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, bottom);
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    // Shapes differ too, for those who see no colours.
    if (mark.kind === "interruption") pen.rect(x - 4, top - 4, 8, 8);
    else if (mark.kind === "slide") pen.arc(x, bottom, 4, 0, 2 * Math.PI);
    else triangle(pen, x, top, mark.kind === "cut" || mark.kind === "underrun" ? 1 : -1);
    pen.fill();
  }

  /** @param {KeyboardEvent} event */
  steer(event) {
    const steps = { ArrowLeft: -STEP, ArrowRight: STEP, PageUp: -1, PageDown: 1 };
    if (event.key in steps) this.moveBy(steps[event.key] * this.spanMs);
    else if (event.key === "Home") this.moveTo(this.spanMs);
    else if (event.key === "End") this.follow();
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else return;
    event.preventDefault();
  }

  /** @param {WheelEvent} event */
  turn(event) {
    // Up and down scroll the page; sideways, or with a key, they are the time line's.
    if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
      this.moveBy((event.deltaX * this.spanMs) / this.canvas.clientWidth);
    else return;
    event.preventDefault();
  }

  /** @param {number} factor */
  zoom(factor) {
    this.spanMs = Math.min(MAX_SPAN_MS, Math.max(MIN_SPAN_MS, factor * this.spanMs));
    this.onMoved();
  }

  /** @param {number} ms */
  moveBy(ms) {
    this.moveTo((this.isLive ? Math.max(this.nowMs, this.spanMs) : this.endMs) + ms);
  }

  /** @param {number} endMs */
  moveTo(endMs) {
    this.endMs = endMs >= this.nowMs ? Infinity : Math.max(this.spanMs, endMs);
    this.onMoved();
  }
}

/** @param {CanvasRenderingContext2D} pen @param {number} x @param {number} y @param {1 | -1} direction */
function triangle(pen, x, y, direction) {
  pen.moveTo(x - 4, y - 4 * direction);
  pen.lineTo(x + 4, y - 4 * direction);
  pen.lineTo(x, y + 4 * direction);
  pen.closePath();
}

/** @param {Element} element @returns {Record<string, string>} */
function readColors(element) {
  const style = getComputedStyle(element);
  const names = ["caller", "model", "rail", "text", "interruption", "slide", "change", "underrun", "cut", "typed"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--line-${name}`).trim()]));
}

/** @param {number} ms @returns {string} */
export function clockOf(ms) {
  const seconds = Math.floor(ms / 1000);
  const two = (value) => String(value).padStart(2, "0");
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return h > 0 ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}
