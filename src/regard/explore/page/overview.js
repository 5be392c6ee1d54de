// Thumbnails of all heads with their roles.
import { paint } from "./colors.js";
import { element } from "./labels.js";

const MIXED = ["mixed", null];

// Heads without a role come last.
const byRole = ([a, score], [b, other]) =>
  (score === null) - (other === null) || a.localeCompare(b) || other - score;

const ORDERS = {
  role: (a, b) => byRole(a.roles[0] ?? MIXED, b.roles[0] ?? MIXED),
  layer: () => 0,
  entropy: (a, b) => a.entropy - b.entropy,
  largest: (a, b) => b.largest - a.largest,
  delimiters: (a, b) => b.delimiters - a.delimiters,
  distance: (a, b) => b.distance - a.distance,
};

export const headName = ({ layer, head }) => `layer ${layer}, head ${head}`;

export function sorted(trace, order) {
  const numbered = trace.heads.map((head, index) => ({ ...head, index }));
  return numbered.sort((a, b) => ORDERS[order](a, b) || a.layer - b.layer || a.head - b.head);
}

export function drawOverview(place, trace, order, palette, onChoose) {
  place.replaceChildren(...sorted(trace, order).map((head) => {
    const picture = thumbnail(trace, head.index, palette), role = badge(head.roles[0] ?? MIXED);
    const button = element("button", {
      type: "button", role: "option", onclick: () => onChoose(head.layer, head.head),
      ariaLabel: [headName(head), ...head.roles.map(([name]) => name)].join(", "),
    }, picture, element("small", {}, `${head.layer} · ${head.head}`), role);
    Object.assign(button.dataset, { layer: head.layer, head: head.head });
    return button;
  }));
}

export function badge([role, score]) {
  return element("small", { className: "badge" }, score === null ? role : `${role} ${score.toFixed(2)}`);
}

// Draws the mass of each block divided by its number of queries, which is smaller in the last row.
function thumbnail(trace, index, palette) {
  const [rows, cols] = trace.thumbnailShape, canvas = element("canvas", { width: cols, height: rows });
  const image = new ImageData(cols, rows), block = trace.thumbnailBlock;
  for (let i = 0; i < rows; i++) {
    const queries = Math.min(block, trace.queries.length - i * block);
    for (let j = 0; j < cols; j++) {
      const mass = trace.thumbnails[(index * rows + i) * cols + j];
      paint(image.data, 4 * (i * cols + j), mass / queries, palette);
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
