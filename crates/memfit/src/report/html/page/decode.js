// Reading the packed sections: base64, zlib, then integers of variable length, as
// memfit-engine's `timeline/coding.rs` writes them.

/** The bytes of a section; an empty array when the page has none of that name. */
async function inflate(id) {
  const element = document.getElementById(id);
  if (!element) return new Uint8Array();
  const text = atob(element.textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  element.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function inflateJson(id) {
  const bytes = await inflate(id);
  return bytes.length ? JSON.parse(new TextDecoder().decode(bytes)) : null;
}

/** Reads columns of integers, one after the other. */
class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.position = 0;
  }

  unsigned() {
    let value = 0;
    let factor = 1;
    for (;;) {
      const byte = this.bytes[this.position++];
      value += (byte & 0x7f) * factor;
      if (byte < 0x80) return value;
      if (byte === undefined) throw new Error("a section of this file ends too early");
      factor *= 128;
    }
  }

  plain(count, unit = 1) {
    const values = new Float64Array(count);
    for (let i = 0; i < count; i++) values[i] = this.unsigned() * unit;
    return values;
  }

  differences(count, unit = 1) {
    const values = new Float64Array(count);
    let value = 0;
    for (let i = 0; i < count; i++) {
      const zigzag = this.unsigned();
      value += zigzag % 2 ? -(zigzag + 1) / 2 : zigzag / 2;
      values[i] = value * unit;
    }
    return values;
  }
}
