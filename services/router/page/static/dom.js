// Elements and words. Text goes in as text only: nothing that the cluster says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// el("div.card", {title: "x"}, child, "text", ...)
export function el(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElement(tag), classes, attributes, children);
}

export function svg(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElementNS(SVG, tag), classes, attributes, children);
}

function fill(node, classes, attributes, children) {
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(...children);
  return node;
}

// A bar of parts that fill it in the ratio of their sizes: [[colour class, size, title], ...] of `whole`.
export function strip(parts, whole, kind = "") {
  const drawn = [];
  let at = 0;
  for (const [colour, size, title] of parts) {
    if (size <= 0 || whole <= 0) continue;
    const width = (100 * size) / whole;
    drawn.push(
      svg(`rect.f-${colour}`, { x: at, y: 0, width: Math.max(width - 0.15, 0.05), height: 10 }, svg("title", {}, title)),
    );
    at += width;
  }
  const classes = ["svg", "strip", ...(kind ? [kind] : [])].join(".");
  return svg(classes, { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": parts.map((p) => p[2]).join(", ") }, ...drawn);
}

export function legend(items) {
  return items.map(([colour, name]) => el("span", {}, el(`i.c-${colour}`), name));
}

// ---- numbers, as people read them

export const number = (value) => Math.round(value).toLocaleString("en-US");

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return value >= 100 || Number.isInteger(value) ? number(value) : value.toPrecision(2);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toPrecision(3)} s`;
  if (value >= 0.001) return `${(value * 1e3).toPrecision(3)} ms`;
  return value > 0 ? `${Math.max(1, Math.round(value * 1e6))} µs` : "0";
}

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
