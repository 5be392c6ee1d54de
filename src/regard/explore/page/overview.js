// All heads as small pictures with their roles.
import { paint } from "./colors.js";

const MIXED = ["mixed", null];

// Heads without a role stand at the end.
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
    const button = document.createElement("button");
    button.type = "button";
    button.role = "option";
    button.dataset.layer = head.layer;
    button.dataset.head = head.head;
    const name = document.createElement("small");
    name.textContent = `${head.layer} · ${head.head}`;
    button.append(thumbnail(trace, head.index, palette), name, badge(head.roles[0] ?? MIXED));
    button.ariaLabel = [headName(head), ...head.roles.map(([role]) => role)].join(", ");
    button.onclick = () => onChoose(head.layer, head.head);
    return button;
  }));
}

export function badge([role, score]) {
  const element = document.createElement("small");
  element.className = "badge";
  element.textContent = score === null ? role : `${role} ${score.toFixed(2)}`;
  return element;
}

// Mass of a block as a share of its queries; the last row of blocks may have fewer of them.
function thumbnail(trace, index, palette) {
  const [rows, cols] = trace.thumbnailShape, canvas = document.createElement("canvas");
  canvas.width = cols;
  canvas.height = rows;
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
