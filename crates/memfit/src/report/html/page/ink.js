// Colours and patterns. Every owner has a pattern of its own, so that the plots read without colour; the colours are
// Okabe and Ito's and a few more that stay apart for colour-blind eyes.

const COLOURS = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
  "#f0e442", "#8c6bb1", "#44aa99", "#b8860b", "#994455", "#b4b8bf",
];

/** Strokes of an 8 x 8 tile, one pattern for each band; the first is plain. */
const TILES = [
  [],
  [[0, 8, 8, 0], [-2, 2, 2, -2], [6, 10, 10, 6]],
  [[1, 2, 3, 2], [5, 6, 7, 6]],
  [[0, 0, 8, 8], [-2, 6, 2, 10], [6, -2, 10, 2]],
  [[0, 4, 8, 4]],
  [[4, 0, 4, 8]],
  [[0, 0, 8, 8], [0, 8, 8, 0]],
  [[0, 4, 8, 4], [4, 0, 4, 8]],
  [[0, 2, 8, 2], [0, 5, 8, 5]],
  [[2, 0, 2, 8], [5, 0, 5, 8]],
  [[0, 4, 4, 0], [4, 8, 8, 4]],
  [[4, 4, 5, 4]],
];

/** The inks of the current colour scheme, made anew when it changes. */
class Inks {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.paper = read("--paper");
    this.ink = read("--ink");
    this.quiet = read("--quiet");
    this.line = read("--line");
    this.panel = read("--panel");
    this.accent = read("--accent");
    this.alarm = read("--alarm");
    this.bands = TILES.map((_, band) => this.#pattern(COLOURS[band], TILES[band], "rgba(0,0,0,0.55)"));
    this.free = this.#pattern(this.paper, TILES[1], this.quiet, 0.7);
  }

  #pattern(background, strokes, colour, width = 1.1) {
    const tile = document.createElement("canvas");
    const ratio = Math.max(1, Math.round(window.devicePixelRatio || 1));
    tile.width = tile.height = 8 * ratio;
    const pen = tile.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = background;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    for (const [x0, y0, x1, y1] of strokes) {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  /** The ink of a band; bands beyond the named ones share the last pattern. */
  band(number, named) {
    return number < named ? this.bands[number] : this.bands.at(-1);
  }
}

/** A canvas's pen, sized to its place on the screen: `{pen, width, height}` in CSS pixels. */
function prepared(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(50, canvas.clientWidth);
  const height = Math.max(20, canvas.clientHeight);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height };
}

/** A short text on a plain ground, readable over any pattern. */
function label(pen, inks, text, x, y, { colour = inks.ink, align = "center" } = {}) {
  const width = pen.measureText(text).width + 6;
  const left = align === "center" ? x - width / 2 : align === "right" ? x - width : x;
  pen.fillStyle = inks.paper;
  pen.globalAlpha = 0.88;
  pen.fillRect(left, y - 8, width, 16);
  pen.globalAlpha = 1;
  pen.fillStyle = colour;
  pen.textAlign = "left";
  pen.fillText(text, left + 3, y + 0.5);
}
