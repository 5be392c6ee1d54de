// The text as clickable tokens, coloured by the weights of the selected query.
import { cssColor, isLight, lowest } from "./colors.js";
import { element, shown } from "./labels.js";

const MOST = 400;

// Returns the range of tokens to show: at most MOST tokens around a position.
export function windowAround(count, position) {
  const first = Math.max(0, Math.min(count - MOST, position - MOST / 2));
  return [Math.floor(first), Math.min(count, Math.floor(first) + MOST)];
}

export function drawTokens(place, trace, { at, ranking, row, marks, palette, onChoose }) {
  const [first, end] = windowAround(trace.keys.length, at);
  const matches = new Set(marks), chosen = row === null ? -1 : row + trace.offset;
  place.replaceChildren(...trace.keys.slice(first, end).map((token, n) => {
    const key = first + n, weight = ranking?.at(key) ?? 0;
    const button = element("button", { type: "button", onclick: () => onChoose(key) }, shown(token));
    button.dataset.key = key;
    if (key === chosen) button.classList.add("chosen");
    if (matches.has(key)) button.classList.add("found");
    if (weight >= lowest()) {
      button.style.background = cssColor(weight, palette);
      button.style.color = isLight(weight, palette) ? "#000" : "#fff";
    }
    return button;
  }));
}
