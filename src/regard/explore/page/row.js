// One query: its largest weights with the text around their keys, and how many keys receive a share.
import { sized, summary } from "./canvas.js";
import { EXACT, NOT_COMPUTED, element, labelElement, number, percent, shown } from "./labels.js";

const LISTED = 60;
const AROUND = 4;  // tokens of text on both sides of a key

// Returns the known weights of a query, { keys, weights, at(key), label, isWhole }. `weights` has all known
// weights and `keys` the keys of the first ones, both in descending order of weight.
export function ranked(head, row, whole) {
  if (whole) return rankedWhole(whole);
  const from = row * head.top, topKeys = Array.from(head.topKeys.subarray(from, from + head.top));
  const keys = topKeys.filter((key) => key >= 0);
  const weights = head.topWeights.subarray(from, from + keys.length);
  return { keys, weights, at: (key) => weights[keys.indexOf(key)] ?? 0, label: EXACT, isWhole: false };
}

function rankedWhole({ values, label }) {
  const weights = values.filter((weight) => weight > 0).sort().reverse(), keys = [];
  const least = weights[Math.min(LISTED, weights.length) - 1];
  values.forEach((weight, key) => { if (weight >= least) keys.push(key); });
  keys.sort((a, b) => values[b] - values[a] || a - b);
  return { keys: keys.slice(0, LISTED), weights, at: (key) => values[key], label, isWhole: true };
}

// Returns how many of the largest weights sum to the share; null if that needs unknown weights.
export function carriers({ weights, isWhole }, share) {
  const total = isWhole ? weights.reduce((a, b) => a + b, 0) : 1;
  let sum = 0;
  for (let n = 0; n < weights.length; n++) {
    sum += weights[n];
    if (sum >= share * total - 1e-6) return { count: n + 1, mass: sum };
  }
  return { count: isWhole ? weights.length : null, mass: sum };
}

export function rowLabel(place, ranking, head, row) {
  const entropy = `${number(head.entropy[row])} nats, ${percent(head.normalized[row])} of the maximum`;
  const facts = ` entropy ${entropy}; largest ${number(head.rowMax[row])}`;
  if (ranking.isWhole) {
    place.replaceChildren(`${ranking.weights.length} weights `, labelElement(ranking.label), facts);
  } else {
    const largest = [`the ${ranking.keys.length} largest weights `, labelElement(EXACT)];
    place.replaceChildren(...largest, " the others ", labelElement(NOT_COMPUTED), facts);
  }
}

export function shareText(ranking, share) {
  const { count, mass } = carriers(ranking, share);
  if (count === null) {
    return `the ${ranking.keys.length} largest weights sum to ${percent(mass)}; the others are not computed`;
  }
  return `${count} of ${ranking.isWhole ? "all" : "the known"} keys receive ${percent(mass)}`;
}

export function listTop(place, ranking, share, trace, onChoose) {
  const { count } = carriers(ranking, share), listed = count ?? ranking.keys.length;
  const lines = ranking.keys.slice(0, listed).map((key, n) => item(key, ranking.weights[n], trace, onChoose));
  place.replaceChildren(...lines);
  if ((count ?? 0) > LISTED) place.append(element("li", {}, `and ${count - LISTED} more`));
}

function item(key, weight, trace, onChoose) {
  const value = element("span", {}, number(weight)), name = element("bdi", {}, shown(trace.keys[key]));
  Object.assign(value.dataset, { key, weight });
  const chooser = { type: "button", onclick: () => onChoose(key) };
  const button = element("button", chooser, name, ` (${key}) `, context(trace.keys, key));
  return element("li", {}, value, button, element("meter", { value: weight, ariaLabel: percent(weight) }));
}

function context(tokens, key) {
  const near = [];
  for (let i = Math.max(0, key - AROUND); i < Math.min(tokens.length, key + AROUND + 1); i++) {
    near.push(i === key ? `[${shown(tokens[i])}]` : shown(tokens[i]));
  }
  return element("bdi", { className: "context" }, near.join(" "));
}

// Draws the known weights over all keys. A pixel shows the largest weight of its keys.
export function drawStrip(canvas, ranking, whole, count) {
  const { context: c, width, height } = sized(canvas);
  let values = whole?.values;
  if (!values) {
    values = new Float32Array(count);
    ranking.keys.forEach((key, n) => { values[key] = ranking.weights[n]; });
  }
  const largest = ranking.weights[0] || 1, step = count / width;
  for (let p = 0; p < width; p++) {
    const barHeight = (summary(values, p * step, (p + 1) * step).largest / largest) * (height - 14);
    c.fillRect(p, height - barHeight, 1, barHeight);
  }
  c.font = "11px system-ui, sans-serif";
  c.fillText(`${ranking.isWhole ? "all" : "the largest"} weights, 0 to ${number(largest)}`, 2, 10, width);
}

// Draws the mass by distance in buckets that double. Keys before the query are right of the middle.
export function drawDistances(canvas, text, head) {
  const { first } = head.distances, buckets = new Map();
  let total = 0;
  head.byDistance.forEach((mass, i) => {
    const bucket = bucketOf(first + i);
    buckets.set(bucket, (buckets.get(bucket) ?? 0) + mass);
    total += mass;
  });
  const names = [...buckets.keys()].sort((a, b) => a - b), { context: c, width, height } = sized(canvas);
  const barWidth = width / names.length, largest = Math.max(...buckets.values()) / total;
  c.font = "10px system-ui, sans-serif";
  c.textAlign = "center";
  names.forEach((bucket, n) => {
    const barHeight = (buckets.get(bucket) / total / (largest || 1)) * (height - 28);
    c.fillRect(n * barWidth + 1, height - 14 - barHeight, Math.max(1, barWidth - 2), barHeight);
    if (n % Math.ceil(names.length / 9)) return;
    c.fillText(bucketName(bucket), n * barWidth + barWidth / 2, height - 2, barWidth * 3);
  });
  const caption = `query − key; the highest bar is ${percent(largest)} of all mass `;
  text.replaceChildren(caption, labelElement(EXACT));
}

const bucketOf = (distance) => Math.sign(distance) * (1 + Math.floor(Math.log2(Math.abs(distance) || 1)));
const bucketName = (bucket) => (bucket === 0 ? "0" : `${Math.sign(bucket) * 2 ** (Math.abs(bucket) - 1)}`);
