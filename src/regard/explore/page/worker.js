// Computes rows of weights in a worker thread, so that the page stays responsive.
import { unpack } from "./arrays.js";
import { rowWeights } from "./scores.js";

const heads = new Map();

async function unpackHead(packed) {
  const [q, k] = await Promise.all([unpack(packed.q), unpack(packed.k)]);
  return { ...packed, q, k, size: packed.q.shape[1] };
}

self.onmessage = async ({ data }) => {
  if (data.packed) heads.set(data.name, unpackHead(data.packed));
  const qk = await heads.get(data.name);
  const rows = data.rows.map((row) => rowWeights(qk, row));
  self.postMessage({ id: data.id, rows }, rows.map((row) => row.buffer));
};
