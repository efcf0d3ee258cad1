// The server's numbers, read from the text format of Prometheus. Shown by tests/page/test_ops.py.

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Sample */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n", '"': '"', "\\": "\\" };

/** Owns what was read at one time. */
export class Metrics {
  /** @param {string} text as `/metrics` gives it */
  constructor(text) {
    /** @type {Map<string, Sample[]>} */
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const found = LINE.exec(line);
      if (found === null) continue;
      const [, name, labels, value] = found;
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ name, labels: labelsOf(labels ?? ""), value: numberOf(value) });
    }
  }

  /** @param {string} name @param {Record<string, string>} labels @returns {number} the sum of all that have these labels */
  sum(name, labels = {}) {
    return this.all(name, labels).reduce((sum, sample) => sum + sample.value, 0);
  }

  /** @param {string} name @param {Record<string, string>} labels @returns {Sample[]} */
  all(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.samples.get(name) ?? []).filter((sample) =>
      wanted.every(([key, value]) => sample.labels[key] === value),
    );
  }

  /** @param {string} name of a histogram @param {Record<string, string>} labels @returns {Histogram} */
  histogram(name, labels = {}) {
    const buckets = this.all(`${name}_bucket`, labels).map(({ labels: { le }, value }) => ({
      upTo: numberOf(le),
      count: value,
    }));
    return new Histogram(
      buckets.sort((one, other) => one.upTo - other.upTo),
      this.sum(`${name}_count`, labels),
    );
  }
}

/** How long something took, as counts of so long or less. */
export class Histogram {
  /** @param {{upTo: number, count: number}[]} buckets each with all below it @param {number} count */
  constructor(buckets, count) {
    this.buckets = buckets;
    this.count = count;
  }

  /** @param {number} part 0 to 1 @returns {number} seconds, within its bucket in proportion; NaN if nothing was measured,
   *  Infinity if it is beyond the last bucket */
  quantile(part) {
    if (this.count === 0) return NaN;
    const wanted = part * this.count;
    let [from, below] = [0, 0];
    for (const { upTo, count } of this.buckets) {
      if (count >= wanted && count > below)
        return upTo === Infinity ? Infinity : from + ((upTo - from) * (wanted - below)) / (count - below);
      [from, below] = [upTo, count];
    }
    return Infinity;
  }

  /** @returns {number[]} of each bucket, what the one below has not */
  get counts() {
    return this.buckets.map(({ count }, place) => count - (place === 0 ? 0 : this.buckets[place - 1].count));
  }
}

/** @param {string} text @returns {number} */
function numberOf(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

/** @param {string} text @returns {Record<string, string>} */
function labelsOf(text) {
  return Object.fromEntries(
    [...text.matchAll(LABEL)].map(([, name, value]) => [
      name,
      value.replace(/\\(.)/g, (_, letter) => ESCAPED[letter] ?? letter),
    ]),
  );
}
