// Wheel, mouse and touch gestures on a heat map.

const STILL = 4;  // pixels that the pointer may move during a click

export function listen(map) {
  const { canvas } = map, pointers = new Map();
  let dragged = false;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = map.toTokens(event);
    if (at) map.zoom(event.deltaY > 0 ? 1.25 : 0.8, { x: at.fx, y: at.fy });
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event);
    dragged = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!map.head) return;
    if (!pointers.has(event.pointerId)) map.onHover(map.toTokens(event));
    else dragged = drag(map, pointers, event, dragged);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    const at = map.head && map.toTokens(event);
    if (!dragged && at) map.onSelect(at.query);
  });
  canvas.addEventListener("dblclick", (event) => {
    const at = map.toTokens(event);
    if (at) map.zoom(0.25, { x: at.fx, y: at.fy });
  });
}

// Pans with one pointer, zooms with two. Returns whether the gesture is more than a click.
function drag(map, pointers, event, dragged) {
  const before = pointers.get(event.pointerId);
  const dx = event.clientX - before.clientX, dy = event.clientY - before.clientY;
  if (!dragged && Math.hypot(dx, dy) < STILL) return false;
  const fixed = [...pointers.values()].find((one) => one.pointerId !== event.pointerId);
  pointers.set(event.pointerId, event);
  if (fixed) pinch(map, before, event, fixed);
  else map.pan(-dx / map.plot.w, -dy / map.plot.h);
  return true;
}

function pinch(map, before, now, fixed) {
  const distance = (one) => Math.hypot(one.clientX - fixed.clientX, one.clientY - fixed.clientY) || 1;
  const at = map.toTokens(fixed);
  map.zoom(distance(before) / distance(now), at ? { x: at.fx, y: at.fy } : undefined);
}
