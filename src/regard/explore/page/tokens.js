// The text as tokens that can be chosen; behind each, how much the chosen query reads it.
import { cssColor, isLight, lowest } from "./colors.js";
import { element, shown } from "./labels.js";

const MOST = 400;

// The part of the text that is written: all of it, or what is around a place.
export function windowAround(count, place) {
  const first = Math.max(0, Math.min(count - MOST, place - MOST / 2));
  return [Math.floor(first), Math.min(count, Math.floor(first) + MOST)];
}

export function drawTokens(place, trace, { at, ranking, row, marks, palette, onChoose }) {
  const [first, end] = windowAround(trace.keys.length, at);
  const found = new Set(marks), chosen = row === null ? -1 : row + trace.offset;
  place.replaceChildren(...trace.keys.slice(first, end).map((token, n) => {
    const key = first + n, weight = ranking?.at(key) ?? 0;
    const button = element("button", { type: "button", onclick: () => onChoose(key) }, shown(token));
    button.dataset.key = key;
    if (key === chosen) button.classList.add("chosen");
    if (found.has(key)) button.classList.add("found");
    if (weight >= lowest()) {
      button.style.background = cssColor(weight, palette);
      button.style.color = isLight(weight, palette) ? "#000" : "#fff";
    }
    return button;
  }));
}
