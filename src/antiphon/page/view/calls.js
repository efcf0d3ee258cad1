// Calls by state over the last minutes, as stacked columns. Shown by tests/page/test_ops.py.

const MAX_COLUMNS = 300;
const COLORS = ["--line-text", "--line-caller", "--line-model"];

/** Owns the counts, oldest first. */
export class History {
  constructor() {
    /** @type {number[][]} */
    this.columns = [];
  }

  /** @param {number[]} counts by state */
  add(counts) {
    this.columns.push(counts);
    if (this.columns.length > MAX_COLUMNS) this.columns.shift();
  }
}

/** @param {HTMLCanvasElement} canvas @param {History} history @param {number} most calls at once */
export function drawCalls(canvas, history, most) {
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const pen = canvas.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  const style = getComputedStyle(canvas);
  const column = width / MAX_COLUMNS;
  const unit = (height - 2) / most;
  pen.fillStyle = style.getPropertyValue("--line-rail");
  pen.fillRect(0, height - 1, width, 1);
  history.columns.forEach((counts, place) => {
    const x = width - (history.columns.length - place) * column;
    let top = height - 1;
    counts.forEach((count, state) => {
      pen.fillStyle = style.getPropertyValue(COLORS[state]);
      top -= count * unit;
      pen.fillRect(x, top, Math.max(1, column - 1), count * unit);
    });
  });
}
