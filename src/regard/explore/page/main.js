// The page: its state, and the updates that follow each change.
import { FLOORS, PALETTES, cssColor, lowest, setLowest } from "./colors.js";
import { HeatMap, haveOneSize } from "./heatmap.js";
import { atBlocks, labelElement, number, shown } from "./labels.js";
import { badge, drawOverview, headName, sorted } from "./overview.js";
import { drawDistances, drawStrip, listTop, ranked, rowLabel, shareText } from "./row.js";
import { openSource } from "./source.js";
import { drawTokens } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const source = openSource();
const state = {
  traces: new Map(), order: "role", palette: "viridis", row: null, marks: [], mark: -1, compared: false,
};
const first = newPane($("map"), $("caption")), second = newPane($("otherMap"), $("otherCaption"));
let headRequests = 0;  // responses to older requests are dropped

function newPane(canvas, caption) {
  const pane = { caption, trace: null, number: null, head: null, whole: null, ranking: null, tile: null };
  pane.map = new HeatMap(canvas, {
    onSelect: (row) => { canvas.focus({ preventScroll: true }); guarded(() => selectRow(row)); },
    onHover: (at) => describeToken(pane, at),
    onView: () => { describeView(pane); link(pane); },
    onNeedTile: (row, key) => loadTile(pane, row, key).catch(complain),
  });
  return pane;
}

async function traceOf(number) {
  if (!state.traces.has(number)) state.traces.set(number, await source.overview(number));
  return state.traces.get(number);
}

async function showTrace(number) {
  const trace = await traceOf(number);
  Object.assign(first, { trace, number });
  Object.assign(state, { row: null, marks: [], mark: -1 });
  $("title").textContent = [trace.model, shown(trace.title)].filter(Boolean).join(" · ");
  document.title = `Regard · ${shown(trace.title)}`;
  $("trace").value = number;
  showOverview();
  const { layer, head } = sorted(trace, state.order)[0];
  await showHead(layer, head);
}

function showOverview() {
  const choose = (layer, head) => guarded(() => showHead(layer, head));
  drawOverview($("overview"), first.trace, state.order, state.palette, choose);
  markHead();
}

async function showHead(layer, head) {
  const request = ++headRequests, facts = await source.head(first.number, layer, head);
  if (request !== headRequests) return;
  first.head = facts;
  $("headName").textContent = headName(facts);
  $("moduleName").textContent = first.trace.layers[layer];
  $("headRoles").replaceChildren(...first.trace.heads.find(isHead(facts)).roles.map(badge));
  first.map.show(facts, first.trace);
  showCheck();
  drawDistances($("distances"), $("distanceText"), facts);
  markHead();
  updateDifference();
  await selectRow(state.row ?? Math.min(1, first.trace.queries.length - 1));
}

const isHead = ({ layer, head }) => (one) => Number(one.layer) === layer && Number(one.head) === head;

function markHead() {
  for (const button of $("overview").children) {
    button.ariaSelected = String(first.head !== null && isHead(first.head)(button.dataset));
  }
}

// Checks that the mass of every row of blocks is its number of queries that are not fully masked.
function showCheck() {
  const { rows, cols, values, block } = first.head.mass.levels[0], { rowMax } = first.head;
  let worst = 0;
  for (let i = 0; i < rows; i++) {
    let sum = 0, expected = 0;
    for (let j = 0; j < cols; j++) sum += values[i * cols + j];
    for (let q = i * block; q < Math.min(rowMax.length, (i + 1) * block); q++) expected += rowMax[q] > 0;
    worst = Math.max(worst, Math.abs(sum - expected) / Math.max(1, expected));
  }
  const text = first.head.hasSink
    ? `Rows sum to less than 1: the sink receives up to ${number(worst)}.`
    : `Check: rows of blocks sum to their number of queries; largest deviation ${worst.toExponential(1)}.`;
  $("check").replaceChildren(text, " ", labelElement(atBlocks(block)));
}

async function selectRow(row) {
  state.row = row;
  for (const pane of panes()) {
    pane.map.row = pane.trace.queries.length > row ? row : null;
    await loadRow(pane);
  }
  showRow();
}

const panes = () => (state.compared ? [first, second] : [first]);

// Shows the largest weights at once, then all weights if they are available.
async function loadRow(pane) {
  const row = pane.map.row;
  pane.whole = pane.ranking = null;
  if (row === null) return;
  pane.ranking = ranked(pane.head, row, null);
  if (pane === first) showRow();
  const { head } = pane, whole = await source.row(head, row);
  if (pane.head !== head || pane.map.row !== row) return;
  pane.whole = whole;
  pane.ranking = ranked(head, row, whole);
}

function showRow() {
  const { map, trace, ranking, whole } = first, share = $("share").value / 100;
  map.draw();
  if (!ranking) return;
  const token = shown(trace.queries[state.row]);
  showRanking(first, `“${token}” (${state.row}) attends to`, share, ["rowTitle", "rowLabel", "top"]);
  drawStrip($("strip"), ranking, whole, trace.keys.length);
  $("shareText").textContent = `${$("share").value} %`;
  $("shareResult").textContent = shareText(ranking, share);
  showTokens();
  showOtherRow(share);
}

function showOtherRow(share) {
  $("otherRow").hidden = !(state.compared && second.ranking);
  if ($("otherRow").hidden) return;
  second.map.draw();
  const token = shown(second.trace.queries[state.row]);
  const title = `${headName(second.head)}: “${token}” attends to`;
  showRanking(second, title, share, ["otherRowTitle", "otherRowLabel", "otherTop"]);
}

function showRanking({ trace, head, ranking }, text, share, [title, label, list]) {
  $(title).textContent = text;
  rowLabel($(label), ranking, head, state.row);
  listTop($(list), ranking, share, trace, chooseKey);
}

function showTokens() {
  drawTokens($("tokens"), first.trace, {
    at: (state.row ?? 0) + first.trace.offset, ranking: first.ranking, row: state.row,
    marks: state.marks, palette: state.palette, onChoose: chooseKey,
  });
}

// Selects a token of the text as the query. If it is only a key, scrolls its column into view.
function chooseKey(key) {
  const row = key - first.trace.offset, { view } = first.map;
  const isQuery = row >= 0 && row < first.trace.queries.length;
  if (!isQuery) return first.map.setView({ ...view, x: key - view.w / 2 });
  first.map.reveal(row);
  return guarded(() => selectRow(row));
}

function describeToken(pane, at) {
  if (!at) return;
  const { text, label } = pane.map.describe(at);
  $("status").replaceChildren(text, " ", labelElement(label));
}

function describeView({ map, caption }) {
  const { x, y, w, h } = map.view;
  const label = map.shownBlock === 1 && map.tileCovers() ? map.tile.label : atBlocks(map.shownBlock);
  const dots = map.hasDots ? " · small squares: the largest weights of each query, exact" : "";
  const end = (from, size) => Math.ceil(from + size) - 1;
  const area = `queries ${Math.floor(y)}–${end(y, h)}, keys ${Math.floor(x)}–${end(x, w)} `;
  caption.replaceChildren(area, labelElement(label), dots);
}

// Loads the single weights of a small view, once.
async function loadTile(pane, row, key) {
  const { head } = pane, name = [head.trace, head.layer, head.head, row, key].join("/");
  if (pane.tile === name) return;
  pane.tile = name;
  const tile = await source.tile(head, row, key);
  if (!tile || pane.tile !== name) return;
  pane.map.tile = { ...tile, row, key };
  pane.map.draw();
  describeView(pane);
}

// --- comparing ---

async function compare(on) {
  state.compared = on;
  $("pin").ariaPressed = String(on);
  $("other").hidden = $("otherBar").hidden = !on;
  if (!on) return showRow();
  const numbers = [...$("trace").options].map((option) => Number(option.value));
  await showOther(second.number ?? numbers.find((number) => number !== first.number) ?? first.number, null);
}

async function showOther(number, which) {
  const trace = await traceOf(number), heads = sorted(trace, "layer");
  Object.assign(second, { trace, number });
  fill($("otherHead"), heads.map((head) => [`${head.layer},${head.head}`, headName(head)]));
  const chosen = which ?? (number === first.number ? nextHead(heads) : heads.find(isFirst) ?? heads[0]);
  $("otherTrace").value = number;
  $("otherHead").value = `${chosen.layer},${chosen.head}`;
  second.head = await source.head(number, chosen.layer, chosen.head);
  second.map.show(second.head, trace);
  updateDifference();
  if (state.row !== null) await selectRow(state.row);
}

let isLinking = false;

// Gives both maps the same view if their sizes are equal.
function link(pane) {
  if (isLinking || !state.compared || !second.head || !haveOneSize(first.trace, second.trace)) return;
  isLinking = true;
  (pane === first ? second : first).map.setView(pane.map.view);
  isLinking = false;
}

const isFirst = (head) => isHead(first.head)(head);
const nextHead = (heads) => heads[(heads.findIndex(isFirst) + 1) % heads.length];

function updateDifference() {
  if (!state.compared || !second.head) return;
  const fits = haveOneSize(first.trace, second.trace) && first.head.block === second.head.block;
  $("otherShows").disabled = !fits;
  if (!fits) $("otherShows").value = "head";
  second.map.minus = $("otherShows").value === "difference" ? first.head : null;
  second.map.moved();
  showLegend();
}

// --- finding ---

// Returns the tokens that contain a text, or the token at a position (#123).
function matches(wanted) {
  const keys = first.trace.keys, position = /^#\d+$/.test(wanted) ? Number(wanted.slice(1)) : null;
  if (position !== null) return position < keys.length ? [position] : [];
  return [...keys.keys()].filter((key) => keys[key].toLowerCase().includes(wanted));
}

function find(text) {
  const wanted = text.toLowerCase();
  state.marks = wanted ? matches(wanted) : [];
  state.mark = -1;
  $("found").textContent = wanted ? `${state.marks.length} found` : "";
  first.map.marks = state.marks;
  first.map.draw();
  showTokens();
}

function findNext() {
  if (!state.marks.length) return;
  state.mark = (state.mark + 1) % state.marks.length;
  $("found").textContent = `${state.mark + 1} of ${state.marks.length}`;
  const key = state.marks[state.mark], { view } = first.map;
  if (key < view.x || key >= view.x + view.w) first.map.setView({ ...view, x: key - view.w / 2 });
  chooseKey(key);
}

// --- settings ---

function showLegend() {
  const context = $("legend").getContext("2d"), { width, height } = $("legend");
  for (let p = 0; p < width; p++) {
    context.fillStyle = cssColor(lowest() ** (1 - p / (width - 1)), state.palette);
    context.fillRect(p, 0, 1, height);
  }
  const scale = "to 1, logarithmic, the same in every map; transparent means 0";
  const signs = "; differences: blue where the first is smaller, orange where it is larger";
  $("legendText").textContent = second.map.minus ? scale + signs : scale;
}

function setTheme(theme) {
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  if (first.head) redraw();
}

function redraw() {
  for (const pane of panes()) pane.map.palette = state.palette;
  showLegend();
  showOverview();
  drawDistances($("distances"), $("distanceText"), first.head);
  showRow();
}

function setKind(kind) {
  $("kind").value = kind;
  first.map.kind = second.map.kind = kind;
  for (const pane of panes()) pane.map.moved();
}

function fill(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
}

async function showTexts(numbers) {
  const traces = await Promise.all(numbers.map(traceOf));
  const names = traces.map((trace, i) => [numbers[i], shown(trace.title)]);
  for (const id of ["trace", "otherTrace"]) {
    fill($(id), names);
    $(`${id}Label`).hidden = numbers.length < 2;
  }
}

async function read(event) {
  event.preventDefault();
  document.documentElement.ariaBusy = "true";
  try {
    const number = await source.read($("text").value);
    await showTexts([...state.traces.keys(), number]);
    await showTrace(number);
  } finally {
    document.documentElement.ariaBusy = null;
  }
}

// --- keys ---

const stepHead = (by) => {
  const heads = sorted(first.trace, state.order), at = heads.findIndex(isFirst);
  const { layer, head } = heads[(at + by + heads.length) % heads.length];
  return showHead(layer, head);
};

const stepRow = (by) => {
  const row = Math.min(first.trace.queries.length - 1, (state.row ?? 0) + by);
  return chooseKey(Math.max(0, row) + first.trace.offset);
};

const KEYS = {
  ArrowUp: () => stepRow(-1), ArrowDown: () => stepRow(1),
  ArrowLeft: () => first.map.pan(-0.1, 0), ArrowRight: () => first.map.pan(0.1, 0),
  "+": () => first.map.zoom(0.5), "=": () => first.map.zoom(0.5), "-": () => first.map.zoom(2),
  0: () => first.map.all(),
  Enter: () => first.map.zoomTo(state.row ?? 0),
  "[": () => stepHead(-1), "]": () => stepHead(1),
  m: () => setKind(first.map.kind === "mass" ? "max" : "mass"),
  c: () => compare(!state.compared),
  "/": () => $("search").focus(), "?": () => $("help").showModal(),
};

const BUTTONS = { zoomIn: "+", zoomOut: "-", zoomAll: 0, zoomRow: "Enter", pin: "c", helpButton: "?" };

function pressed(event) {
  const writes = event.target.matches("input, textarea, select, dialog *");
  const activates = event.target.matches("button") && event.key === "Enter";
  const action = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : null;
  if (!action || writes || activates || event.ctrlKey || event.metaKey || event.altKey || !first.head) return;
  event.preventDefault();
  guarded(action);
}

// Runs an action and shows its error on the page.
async function guarded(action) {
  $("message").hidden = true;
  try {
    await action();
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  $("message").textContent = error.message;
  $("message").hidden = false;
}

function listen() {
  document.addEventListener("keydown", pressed);
  const on = (id, type, action) => $(id).addEventListener(type, (event) => guarded(() => action(event)));
  for (const [id, key] of Object.entries(BUTTONS)) on(id, "click", KEYS[key]);
  on("kind", "change", () => setKind($("kind").value));
  on("sort", "change", () => { state.order = $("sort").value; showOverview(); });
  on("palette", "change", () => { state.palette = $("palette").value; redraw(); });
  on("lowest", "change", () => { setLowest(Number($("lowest").value)); redraw(); });
  on("theme", "change", () => setTheme($("theme").value));
  on("share", "input", showRow);
  on("search", "input", () => find($("search").value));
  on("search", "keydown", (event) => { if (event.key === "Enter") findNext(); });
  on("trace", "change", () => showTrace(Number($("trace").value)));
  on("otherTrace", "change", () => showOther(Number($("otherTrace").value), null));
  on("otherHead", "change", () => {
    const [layer, head] = $("otherHead").value.split(",").map(Number);
    return showOther(second.number, { layer, head });
  });
  on("otherShows", "change", updateDifference);
  on("reader", "submit", read);
  on("text", "keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    $("reader").requestSubmit();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme($("theme").value));
}

async function start() {
  fill($("palette"), PALETTES.map((name) => [name, name]));
  fill($("lowest"), FLOORS.map((value) => [value, value.toFixed(6).replace(/0+$/, "")]));
  $("lowest").value = lowest();
  setTheme("auto");
  showLegend();
  listen();
  const { traces, reads } = await source.start();
  $("reader").hidden = !reads;
  await showTexts(traces);
  if (traces.length) await showTrace(traces[0]);
  document.documentElement.dataset.ready = "yes";
}

guarded(start);
