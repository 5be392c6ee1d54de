// The heat map of a head with its tracks on one canvas: a row per query, a column per key.
// Views { x, y, w, h } are in units of tokens.
import { sized, summary } from "./canvas.js";
import { cssColor, paint } from "./colors.js";
import { listen } from "./gestures.js";
import { EXACT, atBlocks, number, percent, shown } from "./labels.js";

const LEFT = 96, TOP = 92, TRACK = 36, GAP = 6;
const LABEL_PIXELS = 11;  // tokens are labelled from this size on
const SMALLEST = 6;  // tokens in the smallest view
const EXACT_TOKENS = 128;  // single weights are loaded if the view has at most this many rows and columns
const DOT_ROWS = 400;
const NARROW = 500;
const ROW_TRACKS = [["normalized", "entropy"], ["rowMax", "largest"], ["delimiters", "delimiters"]];

export class HeatMap {
  constructor(canvas, { onSelect, onHover, onView, onNeedTile }) {
    Object.assign(this, { canvas, onSelect, onHover, onView, onNeedTile });
    Object.assign(this, { kind: "mass", palette: "viridis", row: null, tile: null, minus: null, marks: [] });
    listen(this);
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(head, trace) {
    const same = this.trace && haveOneSize(this.trace, trace);
    Object.assign(this, { head, trace, tile: null });
    if (same) this.moved(); else this.all();
  }

  all() { this.setView({ x: 0, y: 0, w: this.trace.keys.length, h: this.trace.queries.length }); }

  setView(view) {
    const { keys, queries } = this.trace;
    const w = Math.min(keys.length, Math.max(Math.min(SMALLEST, keys.length), view.w));
    const h = Math.min(queries.length, Math.max(Math.min(SMALLEST, queries.length), view.h));
    const x = Math.max(0, Math.min(keys.length - w, view.x));
    const y = Math.max(0, Math.min(queries.length - h, view.y));
    this.view = { x, y, w, h };
    this.moved();
  }

  moved() {
    this.draw();
    this.onView();
    const { x, y, w, h } = this.view;
    const deep = w <= EXACT_TOKENS && h <= EXACT_TOKENS && this.head.block > 1;
    const start = (token) => Math.floor(token / EXACT_TOKENS) * EXACT_TOKENS;
    if (deep && !this.tileCovers()) this.onNeedTile(start(y), start(x));
  }

  tileCovers() {
    const t = this.tile, v = this.view;
    if (!t || t.row > v.y || t.key > v.x) return false;
    return v.y + v.h <= t.row + t.rows.length && v.x + v.w <= t.key + t.rows[0].length;
  }

  zoom(factor, at = { x: 0.5, y: 0.5 }) {
    const { x, y, w, h } = this.view;
    const less = 1 - factor;
    this.setView({ x: x + at.x * w * less, y: y + at.y * h * less, w: w * factor, h: h * factor });
  }

  pan(dx, dy) {
    const { x, y, w, h } = this.view;
    this.setView({ x: x + dx * w, y: y + dy * h, w, h });
  }

  // Zooms in on a query and a key. Default: the key at the query's position.
  zoomTo(row, key = row + this.trace.offset) {
    const size = 48;
    this.setView({ x: key - size / 2, y: row - size / 2, w: size, h: size });
  }

  reveal(row) {
    const { y, h } = this.view;
    if (row < y || row >= y + h) this.setView({ ...this.view, y: row - h / 2 });
  }

  // Returns the values to draw, { at(i, j), rows, cols, block, y, x }, from the tile or from blocks.
  layer() {
    if (this.tileCovers() && !this.minus) {
      const { rows, row, key } = this.tile;
      return { at: (i, j) => rows[i][j], rows: rows.length, cols: rows[0].length, block: 1, y: row, x: key };
    }
    const level = this.head[this.kind].level(Math.max(this.view.w / this.plot.w, this.view.h / this.plot.h));
    const { rows, cols, block } = level, at = this.reader(this.head, level);
    if (!this.minus) return { at, rows, cols, block, y: 0, x: 0 };
    const other = this.reader(this.minus, this.minus[this.kind].level(block));
    return { at: (i, j) => other(i, j) - at(i, j), rows, cols, block, y: 0, x: 0 };
  }

  reader(head, { values, cols, block }) {
    if (this.kind === "max") return (i, j) => values[i * cols + j];
    const count = this.trace.queries.length;
    return (i, j) => values[i * cols + j] / Math.min(block, count - i * block);
  }

  draw() {
    if (!this.head || !this.canvas.clientWidth) return;
    const { context, width, height, ink } = sized(this.canvas);
    Object.assign(this, { context, ink });
    const narrow = width < NARROW, left = narrow ? 56 : LEFT;
    const tracks = narrow ? 0 : ROW_TRACKS.length * (TRACK + GAP);
    const top = TOP + TRACK + GAP;
    this.plot = { x: left, y: top, w: width - left - tracks, h: height - top - 2 };
    this.drawBlocks();
    this.drawDots();
    this.drawTokens();
    this.drawTracks(narrow);
    this.drawMarks();
    Object.assign(this.canvas.dataset, { plot: JSON.stringify(this.plot), view: JSON.stringify(this.view) });
  }

  drawBlocks() {
    const layer = this.layer(), { x, y, w, h } = this.view, { block } = layer;
    this.shownBlock = block;
    const [j0, j1] = blocksIn(x - layer.x, w, block, layer.cols);
    const [i0, i1] = blocksIn(y - layer.y, h, block, layer.rows);
    const image = new ImageData(j1 - j0, i1 - i0), palette = this.minus ? "difference" : this.palette;
    for (let i = i0, at = 0; i < i1; i++) {
      for (let j = j0; j < j1; j++, at += 4) paint(image.data, at, layer.at(i, j), palette);
    }
    const sheet = new OffscreenCanvas(image.width, image.height);
    sheet.getContext("2d").putImageData(image, 0, 0);
    this.clipped((c) => {
      c.imageSmoothingEnabled = false;
      const [px, py] = this.toPixel(layer.x + j0 * block, layer.y + i0 * block);
      const [qx, qy] = this.toPixel(layer.x + j1 * block, layer.y + i1 * block);
      c.drawImage(sheet, px, py, qx - px, qy - py);
    });
    this.context.strokeStyle = "#808080";
    this.context.strokeRect(this.plot.x - 0.5, this.plot.y - 0.5, this.plot.w + 1, this.plot.h + 1);
  }

  // Draws the largest weights of each query on top of the finest blocks.
  drawDots() {
    const { x, y, w, h } = this.view, { topKeys, topWeights, top, block } = this.head;
    this.hasDots = this.shownBlock > 1 && this.shownBlock === block && h <= DOT_ROWS && !this.minus;
    if (!this.hasDots) return;
    const width = Math.max(2, this.plot.w / w), height = Math.max(2, this.plot.h / h);
    this.clipped((c) => {
      for (let i = Math.floor(y); i < Math.min(this.trace.queries.length, y + h); i++) {
        for (let n = i * top; n < (i + 1) * top; n++) {
          if (topKeys[n] < x - 1 || topKeys[n] > x + w) continue;
          const [px, py] = this.toPixel(topKeys[n], i);
          c.fillStyle = cssColor(topWeights[n], this.palette);
          c.fillRect(px, py, width, height);
          c.strokeStyle = "#ffffff80";
          if (width > 3) c.strokeRect(px + 0.5, py + 0.5, width - 1, height - 1);
        }
      }
    });
  }

  clipped(draw) {
    const { x, y, w, h } = this.plot;
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, w, h);
    this.context.clip();
    draw(this.context);
    this.context.restore();
  }

  drawTokens() {
    const { x, y, w, h } = this.view, c = this.context;
    c.fillStyle = this.ink;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const [i, text] of this.labels(y, h, this.plot.h, this.trace.queries)) {
      c.fillText(text, this.plot.x - 4, this.toPixel(0, i + 0.5)[1], this.plot.x - 6);
    }
    for (const [j, text] of this.labels(x, w, this.plot.w, this.trace.keys)) {
      this.writeUp(text, this.toPixel(j + 0.5, 0)[0], TOP - 4, TOP - 8);
    }
  }

  // Returns the labels of an axis as [index, text]: tokens if there is room, else positions.
  labels(start, size, pixels, tokens) {
    const tokenPixels = pixels / size;
    const every = tokenPixels >= LABEL_PIXELS ? 1 : niceStep(40 / tokenPixels);
    const labels = [];
    const end = Math.min(tokens.length, start + size - 0.3);
    for (let i = Math.ceil(Math.max(0, start) / every) * every; i < end; i += every) {
      labels.push([i, every === 1 ? shown(tokens[i]).slice(0, 16) : String(i)]);
    }
    return labels;
  }

  drawTracks(narrow) {
    const { plot, view } = this, c = this.context;
    const largest = this.head.column.reduce((a, b) => Math.max(a, b), 0);
    c.fillStyle = this.ink;
    const y = TOP + TRACK;
    this.eachPixel(this.head.column, view.x, view.w, plot.w, (p, value) => {
      const barHeight = (value / (largest || 1)) * TRACK;
      c.fillRect(plot.x + p, y - barHeight, 1, barHeight);
    });
    this.caption("received,", 2, y - 20, plot.x - 6);
    this.caption(`0 to ${number(largest)}`, 2, y - 7, plot.x - 6);
    if (narrow) return;
    ROW_TRACKS.forEach(([name, text], n) => {
      const x = plot.x + plot.w + GAP + n * (TRACK + GAP);
      const bar = (p, value) => c.fillRect(x, plot.y + p, value * TRACK, 1);
      this.eachPixel(this.head[name], view.y, view.h, plot.h, bar);
      c.strokeRect(x - 0.5, plot.y - 0.5, TRACK, plot.h + 1);
      this.writeUp(`${text}, 0 to 1`, x + TRACK / 2, plot.y - 6, TOP);
    });
  }

  // Draws the tokens of each pixel: their maximum pale, their mean dark.
  eachPixel(values, start, size, pixels, draw) {
    const step = size / pixels;
    for (let p = 0; p < pixels; p++) {
      const { largest, mean } = summary(values, start + p * step, start + (p + 1) * step);
      this.context.globalAlpha = 0.35;
      draw(p, largest);
      this.context.globalAlpha = 1;
      draw(p, mean);
    }
  }

  caption(text, x, y, width) {
    this.context.textAlign = "left";
    this.context.fillText(text, x, y, width);
  }

  // Draws a caption from bottom to top.
  writeUp(text, x, y, width) {
    this.context.save();
    this.context.translate(x, y);
    this.context.rotate(-Math.PI / 2);
    this.caption(text, 0, 0, width);
    this.context.restore();
  }

  // Marks the selected query and the search results.
  drawMarks() {
    const c = this.context, accent = getComputedStyle(document.documentElement).getPropertyValue("--mark");
    c.fillStyle = c.strokeStyle = accent;
    for (const index of this.marks) {
      const [px] = this.toPixel(index + 0.5, 0), [, py] = this.toPixel(0, index - this.trace.offset + 0.5);
      if (px >= this.plot.x && px <= this.plot.x + this.plot.w) c.fillRect(px - 1, TOP + TRACK, 2, GAP);
      if (py >= this.plot.y && py <= this.plot.y + this.plot.h) c.fillRect(this.plot.x - 4, py - 1, 4, 2);
    }
    if (this.row === null) return;
    this.clipped(() => {
      const [, a] = this.toPixel(0, this.row), [, b] = this.toPixel(0, this.row + 1);
      c.lineWidth = 1.5;
      c.strokeRect(this.plot.x - 2, a - 1, this.plot.w + 4, Math.max(2, b - a + 2));
    });
  }

  toPixel(key, query) {
    const { x, y, w, h } = this.view, p = this.plot;
    return [p.x + ((key - x) / w) * p.w, p.y + ((query - y) / h) * p.h];
  }

  // Returns the query and the key under a pointer, or null.
  toTokens(event) {
    const box = this.canvas.getBoundingClientRect(), p = this.plot;
    const fx = (event.clientX - box.left - p.x) / p.w, fy = (event.clientY - box.top - p.y) / p.h;
    if (fx < 0 || fx >= 1 || fy < 0 || fy >= 1) return null;
    const { x, y, w, h } = this.view;
    return { fx, fy, key: Math.floor(x + fx * w), query: Math.floor(y + fy * h) };
  }

  // Returns the block or weight at a position as text, and its exactness label.
  describe({ key, query }) {
    const block = this.shownBlock;
    if (this.minus) return this.describeDifference(query, key, block);
    if (block === 1) {
      const layer = this.layer(), value = layer.at(query - layer.y, key - layer.x);
      const label = this.tileCovers() ? this.tile.label : EXACT;
      return { text: `${this.pair(query, key)}: ${percent(value)}`, label };
    }
    return this.describeBlock(Math.floor(query / block), Math.floor(key / block), block);
  }

  describeDifference(query, key, block) {
    const value = this.layer().at(Math.floor(query / block), Math.floor(key / block));
    return { text: `${this.pair(query, key)}: first minus this ${percent(value)}`, label: atBlocks(block) };
  }

  pair(query, key) {
    return `“${shown(this.trace.queries[query])}” (${query}) to “${shown(this.trace.keys[key])}” (${key})`;
  }

  describeBlock(i, j, block) {
    const { queries, keys } = this.trace, level = this.head.mass.level(block);
    const q1 = Math.min(queries.length, (i + 1) * block) - 1, k1 = Math.min(keys.length, (j + 1) * block) - 1;
    const at = i * level.cols + j, mass = level.values[at], largest = this.head.max.level(block).values[at];
    const share = percent(mass / (q1 - i * block + 1));
    const area = `queries ${i * block}–${q1}, keys ${j * block}–${k1}`;
    const text = `${area}: mass ${number(mass)}, ${share} per query; largest weight ${number(largest)}`;
    return { text, label: atBlocks(block) };
  }
}

export const haveOneSize = (a, b) =>
  a.keys.length === b.keys.length && a.queries.length === b.queries.length;

// Returns the range [first, end) of blocks that overlap a range of tokens.
function blocksIn(start, size, block, count) {
  return [Math.max(0, Math.floor(start / block)), Math.min(count, Math.ceil((start + size) / block))];
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(1, [1, 2, 5, 10].find((n) => n * power >= least) * power);
}
