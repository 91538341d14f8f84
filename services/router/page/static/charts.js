// Small charts over the last minutes, drawn as SVG. A point without a value leaves a gap rather than a zero.

import { svg } from "./dom.js";

const LEFT = 44;
const BOTTOM = 18;
const TOP = 8;

// Draws into `box`, as large as it is. times: ms, one a point. series: [{colour, values}], stacked: on top of one another.
// format: of the axis' numbers. top: where the axis ends; 0: above what is there.
export function chart(box, times, series, { format, stacked = false, top = 0, spanMs }) {
  const size = { width: Math.max(box.clientWidth, 200), height: Math.max(box.clientHeight, 80) };
  const end = times.at(-1) ?? 0;
  const x = (time) => LEFT + (size.width - LEFT) * (1 - (end - time) / spanMs);
  const sums = times.map(() => 0);
  const layers = series.map(({ colour, values }) => {
    const lower = stacked ? sums.slice() : null;
    const upper = values.map((value, at) => (stacked ? (sums[at] += value) : value));
    return { colour, lower, upper };
  });
  const known = layers.flatMap((layer) => layer.upper).filter((value) => value !== null);
  const most = Math.max(top, ...known, 0);
  const highest = top || nice(most) || 1;
  const y = (value) => TOP + (size.height - TOP - BOTTOM) * (1 - value / highest);
  const isEmpty = !known.length || (most === 0 && !top);
  const drawn = [grid(highest, y, format, size, isEmpty ? [0] : [0, 0.5, 1]), ...timeMarks(spanMs, (ago) => x(end - ago), size)];
  if (isEmpty) {
    drawn.push(svg("text.nothing", { x: (LEFT + size.width) / 2, y: size.height / 2, "text-anchor": "middle" }, "nothing yet"));
  } else {
    for (const layer of layers) drawn.push(...drawLayer(layer, times, x, y));
  }
  box.replaceChildren(svg("svg", { viewBox: `0 0 ${size.width} ${size.height}`, "aria-hidden": "true" }, ...drawn));
}

function drawLayer({ colour, lower, upper }, times, x, y) {
  const paths = [];
  for (const run of runs(upper)) {
    const line = run.map((at) => `${x(times[at]).toFixed(1)},${y(upper[at]).toFixed(1)}`);
    if (lower) {
      const under = run.map((at) => `${x(times[at]).toFixed(1)},${y(lower[at]).toFixed(1)}`).reverse();
      paths.push(svg(`polygon.c-${colour}`, { points: [...line, ...under].join(" ") }));
    } else if (run.length === 1) {
      paths.push(svg(`circle.s-${colour}.f-${colour}`, { cx: x(times[run[0]]), cy: y(upper[run[0]]), r: 2 }));
    } else {
      const floor = [`${x(times[run.at(-1)]).toFixed(1)},${y(0)}`, `${x(times[run[0]]).toFixed(1)},${y(0)}`];
      paths.push(svg(`polygon.under.f-${colour}`, { points: [...line, ...floor].join(" ") }));
      paths.push(svg(`polyline.line.s-${colour}`, { points: line.join(" ") }));
    }
  }
  return paths;
}

// Indices of neighbours that have a value.
function runs(values) {
  const found = [];
  let run = [];
  values.forEach((value, at) => {
    if (value !== null) run.push(at);
    else if (run.length) {
      found.push(run);
      run = [];
    }
  });
  if (run.length) found.push(run);
  return found;
}

function grid(highest, y, format, size, shares) {
  const lines = shares.flatMap((share) => {
    const at = y(highest * share);
    return [
      svg("line.grid", { x1: LEFT, x2: size.width, y1: at, y2: at }),
      svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, format(highest * share)),
    ];
  });
  return svg("g", {}, ...lines);
}

function timeMarks(spanMs, x, size) {
  const minutes = spanMs / 60000;
  return [minutes, minutes / 2, 0].map((ago) =>
    svg("text", { x: x(ago * 60000), y: size.height - 3, "text-anchor": ago === 0 ? "end" : ago === minutes ? "start" : "middle" },
      ago === 0 ? "now" : ago < 1 ? `−${60 * ago} s` : `−${ago} min`),
  );
}

// The next number above that reads well.
function nice(value) {
  if (value <= 0) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value);
}
