// The sources of data, a server or the file itself, with the same methods.
import { unpack } from "./arrays.js";
import { EXACT, HALF } from "./labels.js";
import { Pyramid } from "./pyramid.js";

const ARRAYS = ["mass", "column", "entropy", "normalized", "rowMax", "delimiters", "topWeights", "topKeys"];
const TILE = 256;

async function unpackHead(packed, trace) {
  const head = { ...packed, trace };
  await Promise.all(ARRAYS.map(async (name) => { head[name] = await unpack(packed[name]); }));
  const [rows, cols] = packed.mass.shape;
  const largest = packed.max ? await unpack(packed.max) : head.mass;
  head.mass = new Pyramid(head.mass, rows, cols, packed.block, true);
  head.max = new Pyramid(largest, rows, cols, packed.block, false);
  head.byDistance = await unpack(packed.distances.mass);
  head.top = packed.topKeys.shape[1];
  return head;
}

async function unpackOverview(overview) {
  return {
    ...overview,
    queries: overview.queries ?? overview.keys,
    thumbnails: await unpack(overview.thumbnails),
    thumbnailShape: overview.thumbnails.shape.slice(1),
  };
}

const rowOfBlocks = ({ values, cols }, row) => values.slice(row * cols, (row + 1) * cols);

class FileSource {
  constructor(data) {
    this.traces = data.traces;
    this.worker = null;
    this.requests = 0;
    this.waiting = new Map();
    this.sent = new Set();
  }

  async start() { return { traces: this.traces.map((_, i) => i), reads: false }; }

  overview(trace) { return unpackOverview(this.traces[trace]); }

  head(trace, layer, head) { return unpackHead(this.packed(trace, layer, head), trace); }

  packed(trace, layer, head) {
    return this.traces[trace].facts.find((one) => one.layer === layer && one.head === head);
  }

  async row(head, row) {
    if (head.block === 1) return { values: rowOfBlocks(head.mass.levels[0], row), label: EXACT };
    if (head.rows?.[row]) return { values: await unpack(head.rows[row]), label: EXACT };
    if (!head.qk) return null;
    const [values] = await this.computed(head, [row]);
    return { values, label: HALF };
  }

  async tile(head, row, key) {
    if (!head.qk) return null;
    const { queries, keys } = this.traces[head.trace], count = Math.min(TILE, (queries ?? keys).length - row);
    const rows = await this.computed(head, Array.from({ length: count }, (_, i) => row + i));
    return { rows: rows.map((values) => values.subarray(key, key + TILE)), label: HALF };
  }

  // Computes rows from q and k in the worker, which keeps the q and k of each head.
  computed(head, rows) {
    this.worker ??= this.startWorker();
    const name = `${head.trace}/${head.layer}/${head.head}`, id = this.requests++;
    const packed = this.sent.has(name) ? null : head.qk;
    this.sent.add(name);
    this.worker.postMessage({ id, name, packed, rows });
    return new Promise((resolve) => this.waiting.set(id, resolve));
  }

  startWorker() {
    const code = JSON.parse(document.getElementById("worker").textContent);
    const worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
    worker.onmessage = ({ data }) => {
      this.waiting.get(data.id)(data.rows);
      this.waiting.delete(data.id);
    };
    return worker;
  }
}

class ServerSource {
  start() { return request("api"); }

  async overview(trace) { return unpackOverview(await request(`api/${trace}`)); }

  async head(trace, layer, head) { return unpackHead(await request(`api/${trace}/${layer}/${head}`), trace); }

  async row(head, row) {
    if (head.block === 1) return { values: rowOfBlocks(head.mass.levels[0], row), label: EXACT };
    const answer = await request(`api/${head.trace}/${head.layer}/${head.head}/rows/${row}`);
    return { values: await unpack(answer.row), label: EXACT };
  }

  async tile(head, row, key) {
    const { tile } = await request(`api/${head.trace}/${head.layer}/${head.head}/tiles/${row}/${key}`);
    const values = await unpack(tile), [count, width] = tile.shape;
    const rows = Array.from({ length: count }, (_, i) => values.subarray(i * width, (i + 1) * width));
    return { rows, label: EXACT };
  }

  async read(text) {
    const headers = { "Content-Type": "application/json" }, body = JSON.stringify({ text });
    return (await request("api/text", { method: "POST", headers, body })).trace;
  }
}

async function request(path, options) {
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

export function openSource() {
  const data = document.getElementById("data");
  return data ? new FileSource(JSON.parse(data.textContent)) : new ServerSource();
}
