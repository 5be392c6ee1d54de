// Decodes arrays that Python packed: base64 of a zlib stream, little-endian.

const TYPES = { f4: Float32Array, i4: Int32Array, f2: Uint16Array };

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

export async function unpack(packed) {
  const stream = new Blob([bytesOf(packed.data)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const values = new TYPES[packed.type](await new Response(stream).arrayBuffer());
  return packed.type === "f2" ? fromHalf(values) : values;
}

// Converts float16 bit patterns to float32.
function fromHalf(bits) {
  const table = new Float32Array(65536);
  for (let i = 0; i < 65536; i++) {
    const exponent = (i >> 10) & 31, fraction = i & 1023;
    const magnitude = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
    table[i] = i & 32768 ? -magnitude : magnitude;
  }
  return Float32Array.from(bits, (i) => table[i]);
}
