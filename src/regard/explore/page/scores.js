// Computes rows of weights from q and k: softmax(softcap(scale * q.k)) over the allowed keys.

// qk: { q (Lq, D), k (Lk, D), size: D, scale, softcap, sink, left, right, offset }
export function rowWeights(qk, row) {
  const { q, k, size } = qk;
  const count = k.length / size;
  const weights = new Float64Array(count);
  const [first, end] = allowedKeys(qk, row, count);
  if (first >= end) return Float32Array.from(weights);
  let largest = qk.sink ?? -Infinity;
  for (let key = first; key < end; key++) {
    let sum = 0;
    for (let d = 0, a = row * size, b = key * size; d < size; d++) sum += q[a + d] * k[b + d];
    const score = qk.scale * sum;
    weights[key] = qk.softcap ? qk.softcap * Math.tanh(score / qk.softcap) : score;
    if (weights[key] > largest) largest = weights[key];
  }
  let total = qk.sink === null ? 0 : Math.exp(qk.sink - largest);
  for (let key = first; key < end; key++) total += weights[key] = Math.exp(weights[key] - largest);
  for (let key = first; key < end; key++) weights[key] /= total;
  return Float32Array.from(weights);
}

function allowedKeys(qk, row, count) {
  const position = row + qk.offset;
  const first = qk.left === null ? 0 : Math.max(0, position - qk.left);
  const end = qk.right === null ? count : Math.min(count, position + qk.right + 1);
  return [first, end];
}
