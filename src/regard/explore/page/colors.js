// Palettes with monotone lightness, which are readable without colour vision.

const STOPS = {
  viridis: [
    "#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c",
    "#28ae80", "#5ec962", "#addc30", "#fde725",
  ],
  cividis: [
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173",
    "#8a8678", "#a59c74", "#c3b369", "#fee838",
  ],
  grey: ["#101010", "#ffffff"],
};
const DIVERGING = ["#2166ac", "#92c5de", "#f7f7f7", "#fdb863", "#b35806"];  // blue and orange

export const PALETTES = Object.keys(STOPS);
export const FLOORS = [0.01, 0.001, 0.0001, 0.000001];

let floor = 0.001, decades = 3;

export const lowest = () => floor;

// Sets the weight with the darkest colour. Weight 1 has the brightest.
export function setLowest(value) {
  floor = value;
  decades = -Math.log10(value);
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function ramp(stops) {
  const table = new Uint8ClampedArray(256 * 3), colors = stops.map(channels);
  for (let i = 0; i < 256; i++) {
    const stop = (i / 255) * (colors.length - 1), low = Math.min(Math.floor(stop), colors.length - 2);
    for (let c = 0; c < 3; c++) {
      table[i * 3 + c] = colors[low][c] + (stop - low) * (colors[low + 1][c] - colors[low][c]);
    }
  }
  return table;
}

const RAMPS = Object.fromEntries(PALETTES.map((name) => [name, ramp(STOPS[name])]));
const DIFFERENCES = ramp(DIVERGING);

// Maps a weight to one of 256 steps on a logarithmic scale.
export function step(value) {
  return Math.max(0, Math.min(255, Math.round(255 * (1 + Math.log10(value) / decades))));
}

// Writes the colour of a weight, or of a difference of two weights, into pixels. 0 stays transparent.
export function paint(pixels, at, value, palette) {
  if (value === 0) return;
  if (palette === "difference") {
    put(pixels, at, DIFFERENCES, Math.round(127.5 + Math.sign(value) * (step(Math.abs(value)) / 2)));
  } else {
    put(pixels, at, RAMPS[palette], step(value));
  }
}

function put(pixels, at, table, index) {
  for (let c = 0; c < 3; c++) pixels[at + c] = table[index * 3 + c];
  pixels[at + 3] = 255;
}

function colorOf(value, palette) {
  const pixel = [0, 0, 0, 0];
  paint(pixel, 0, value, palette);
  return pixel.slice(0, 3);
}

export const cssColor = (value, palette) => `rgb(${colorOf(value, palette).join(" ")})`;

// Returns whether black has more contrast than white on the colour of this weight.
export function isLight(value, palette) {
  const [red, green, blue] = colorOf(value, palette);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 130;
}
