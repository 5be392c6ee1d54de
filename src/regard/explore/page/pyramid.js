// Blocks of weights at several resolutions. Each coarser block is the sum or the maximum of four blocks.

export class Pyramid {
  constructor(values, rows, cols, block, isMass) {
    this.levels = [{ values, rows, cols, block }];
    while (this.last.rows > 1 || this.last.cols > 1) this.levels.push(parent(this.last, isMass));
  }

  get last() { return this.levels[this.levels.length - 1]; }

  // Returns the finest level whose blocks are at least `least` tokens wide.
  level(least) { return this.levels.find((level) => level.block >= least) ?? this.last; }
}

function parent(below, isMass) {
  const rows = Math.ceil(below.rows / 2), cols = Math.ceil(below.cols / 2);
  const values = new Float32Array(rows * cols);
  for (let i = 0; i < below.rows; i++) {
    for (let j = 0; j < below.cols; j++) {
      const at = (i >> 1) * cols + (j >> 1), value = below.values[i * below.cols + j];
      values[at] = isMass ? values[at] + value : Math.max(values[at], value);
    }
  }
  return { values, rows, cols, block: below.block * 2 };
}
