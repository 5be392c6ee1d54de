// Helpers of all drawings: a canvas at screen resolution, and a summary of the tokens in one pixel.

// Clears a canvas and scales it to CSS pixels. The fill colour is the text colour.
export function sized(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.max(1, canvas.clientWidth), height = Math.max(1, canvas.clientHeight);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d"), ink = getComputedStyle(canvas).color;
  context.scale(scale, scale);
  context.fillStyle = ink;
  return { context, width, height, ink };
}

// Returns the maximum and the mean of the values in the token range [a, b); a and b may be fractional.
export function summary(values, a, b) {
  const first = Math.max(0, Math.floor(a));
  const end = Math.min(values.length, Math.max(Math.floor(b + 1e-9), first + 1));
  let largest = 0, sum = 0;
  for (let i = first; i < end; i++) {
    sum += values[i];
    if (values[i] > largest) largest = values[i];
  }
  return { largest, mean: sum / Math.max(1, end - first) };
}
