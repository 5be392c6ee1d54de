// Exactness labels, one of which accompanies every number on the page, and the formats of numbers and tokens.

export const EXACT = { name: "exact", kind: "exact" };
export const HALF = { name: "exact for the embedded 16-bit q and k", kind: "exact" };
export const NOT_COMPUTED = { name: "not computed", kind: "none" };

export function atBlocks(block) {
  if (block === 1) return EXACT;
  return { name: `exact at block resolution, ${block} × ${block} tokens`, kind: "block" };
}

export function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export const labelElement = ({ kind, name }) => element("span", { className: `label ${kind}` }, name);

export const percent = (share) => `${(100 * share).toPrecision(3)} %`;
export const number = (value) => (value === 0 ? "0" : value.toPrecision(4));

const LONGEST = 60;

// Returns a token for display: control characters become visible symbols, long tokens are truncated.
export function shown(token) {
  const short = token.length > LONGEST ? `${token.slice(0, LONGEST)}…` : token;
  return short.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(HIDDEN, "\ufffd") || "∅";
}

// Control characters, bidirectional marks and joiners, which would change the text around them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
