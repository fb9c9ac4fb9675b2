"use strict";
// Draws the data of page_data.py on one canvas per panel. page_interaction.js handles input.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const AXIS = 26;
const FONT = "11px system-ui, 'DejaVu Sans', sans-serif";
const panels = data.panels.map(decode);
let longest = longestVisible();
const view = { from: 0, to: longest, phase: "all" };
const selected = { panel: null, at: -1, idle: false, pinned: false };
let memory = false;

function longestVisible() {
  return Math.max(...panels.filter((panel) => panel.visible).map((panel) => panel.makespan), 0) || 1;
}

// Decodes a panel: start and end times, the rank of each step, the first step of each rank.
function decode(written) {
  const count = written.kinds.length;
  const ranks = written.counts.length;
  const panel = {
    ...written, ranks, indices: null, shift: 0,
    start: new Float64Array(count), end: new Float64Array(count), rank: new Uint32Array(count),
    first: new Uint32Array(ranks + 1), awaited: new Map(written.waits),
  };
  panel.peak = 0;
  let warm = -1, cool = Infinity; // first backward of the last rank to have one; end of the first rank's forwards
  for (let rank = 0, at = 0; rank < ranks; rank++) {
    let now = 0, backward = -1, forward = Infinity;
    for (const last = at + written.counts[rank]; at < last; at++) {
      panel.start[at] = (now += written.gaps[at]) * written.tick;
      panel.end[at] = (now += written.times[at]) * written.tick;
      panel.rank[at] = rank;
      panel.peak = Math.max(panel.peak, written.during[at]);
      if (panel.kinds[at] === "F") forward = panel.end[at];
      else if (backward < 0) backward = panel.start[at];
    }
    panel.first[rank + 1] = at;
    warm = Math.max(warm, backward);
    cool = Math.min(cool, forward);
  }
  panel.phases = warm < 0 ? null : { warm, cool };
  return panel;
}

// Text

const number = (value) => String(Number(value.toPrecision(5)));
const time = (value) => `${number(value)} ${data.unit}`;

function stepName(panel, at) {
  const short = `${panel.kinds[at]}${panel.batches[at]} of stage ${panel.stages[at]}`;
  return { long: `${data.kind_names[panel.kinds[at]]} of micro-batch ${panel.batches[at]}`, short };
}

// The phases of a measured step in the gap before a step are no waits.
function phaseTime(panel, at) {
  const from = panel.start[at] - panel.gaps[at] * panel.tick - panel.tick, to = panel.start[at] + panel.tick;
  const inside = (panel.outside[panel.rank[at]] ?? []).filter(([, start, end]) => start >= from && end <= to);
  return inside.reduce((sum, [, start, end]) => sum + end - start, 0);
}

function waitText(panel, at) {
  const waited = Math.max(0, panel.gaps[at] * panel.tick - phaseTime(panel, at));
  if (waited <= 0) return time(0);
  const awaited = panel.awaited.get(at);
  if (awaited === undefined) return `${time(waited)}, not for another rank`;
  return `${time(waited)} for ${stepName(panel, awaited).short}, rank ${panel.rank[awaited]}`;
}

function memoryText(panel, at) {
  const during = panel.during[at] * panel.memory_tick;
  const after = panel.after[at] * panel.memory_tick;
  const then = after === during ? "" : `, then ${number(after)}`;
  return `${number(during)} ${data.memory_unit}${then}`;
}

// Index of the same step in another panel, -1 if it has none.
function sameStep(panel, other, at) {
  const key = (of, i) => `${of.kinds[i]}${of.batches[i]}@${of.stages[i]}`;
  if (!other.indices) {
    other.indices = new Map();
    for (let i = 0; i < other.kinds.length; i++) other.indices.set(key(other, i), i);
  }
  return other.indices.get(key(panel, at)) ?? -1;
}

function details(panel, at) {
  const span = (of, i) =>
    `${number(of.start[i])} to ${number(of.end[i])} ${data.unit} (${number(of.end[i] - of.start[i])})`;
  const stages = Math.max(...panel.chunk_of_stage) + 1;
  const chunk = stages > 1 ? `, stage ${panel.chunk_of_stage[panel.stages[at]] + 1} of ${stages} on the rank` : "";
  const rows = [
    ["stage", String(panel.stages[at])],
    ["rank", `${panel.rank[at]}${chunk}`],
    ["time", span(panel, at)],
    ["waited", waitText(panel, at)],
    ["memory", memoryText(panel, at)],
  ];
  for (const other of panels) {
    if (other === panel || !other.visible) continue;
    const there = sameStep(panel, other, at);
    if (there >= 0) rows.push([other.short, span(other, there)]);
  }
  return rows;
}

// Drawing

const colours = () => data.shades[dark.matches ? "dark" : "light"];

function layout(panel) {
  panel.width = panel.canvas.clientWidth;
  const context = panel.canvas.getContext("2d");
  context.font = FONT;
  // The unit stands left of the numbers of the axis.
  panel.left = panel.width < 560 ? 28 : Math.max(58, context.measureText(data.unit).width + 10);
  panel.plot = Math.max(20, panel.width - panel.left - 8);
  panel.bar = panel.ranks <= 8 ? 26 : panel.ranks <= 16 ? 20 : panel.ranks <= 32 ? 14 : 9;
  panel.strip = memory ? Math.max(8, Math.round(panel.bar * 0.8)) : 0;
  panel.row = panel.bar + panel.strip + (panel.bar > 9 ? 4 : 1);
  panel.height = panel.row * panel.ranks + AXIS;
}

// `shift` aligns the phases of panels with different makespans: the first visible time of a panel is view.from + shift.
const fromOf = (panel) => view.from + panel.shift;
const toOf = (panel) => view.to + panel.shift;
const xOf = (panel, moment) => panel.left + ((moment - fromOf(panel)) / (view.to - view.from)) * panel.plot;
const timeOf = (panel, x) => fromOf(panel) + ((x - panel.left) / panel.plot) * (view.to - view.from);

function draw(panel) {
  layout(panel);
  const { canvas, width, height } = panel;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  Object.assign(canvas.dataset, { left: panel.left, plot: panel.plot, row: panel.row, from: fromOf(panel), to: toOf(panel) });
  const context = canvas.getContext("2d");
  const css = getComputedStyle(document.documentElement);
  const cssColour = (name) => css.getPropertyValue(`--${name}`).trim();
  context.scale(ratio, ratio);
  context.font = FONT;
  context.textBaseline = "middle";
  drawAxis(context, panel, cssColour);
  context.fillStyle = cssColour("muted");
  const every = Math.max(1, Math.ceil(14 / panel.row));
  for (let rank = 0; rank < panel.ranks; rank += every) {
    context.fillText(panel.left > 40 ? `rank ${rank}` : String(rank), 0, Math.max(7, rank * panel.row + panel.bar / 2));
  }
  context.save();
  context.beginPath();
  context.rect(panel.left, 0, panel.plot, height);
  context.clip();
  for (let rank = 0; rank < panel.ranks; rank++) drawRank(context, panel, rank, cssColour);
  for (const mark of marks(panel)) drawMark(context, panel, mark, cssColour);
  context.restore();
}

// Index of the first step of a rank that ends after a time.
function firstAfter(panel, rank, moment) {
  let low = panel.first[rank], high = panel.first[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (panel.end[middle] > moment) high = middle; else low = middle + 1;
  }
  return low;
}

function drawRank(context, panel, rank, cssColour) {
  const top = rank * panel.row, shades = colours().fill, texts = colours().text;
  const finish = xOf(panel, panel.makespan);
  context.fillStyle = cssColour("idle");
  context.fillRect(xOf(panel, 0), top, finish - xOf(panel, 0), panel.bar);
  for (const [name, from, to] of panel.outside[rank] ?? []) {
    const left = xOf(panel, from), wide = xOf(panel, to) - left;
    context.fillStyle = data.phases[name];
    context.fillRect(left, top, Math.max(0.7, wide), panel.bar);
  }
  const begin = firstAfter(panel, rank, fromOf(panel));
  const last = Math.min(firstAfter(panel, rank, toOf(panel)) + 1, panel.first[rank + 1]);
  if (last - begin > panel.plot / 2) drawBlend(context, panel, rank, begin, last, cssColour);
  for (let at = begin; last - begin <= panel.plot / 2 && at < last; at++) {
    const left = xOf(panel, panel.start[at]), wide = xOf(panel, panel.end[at]) - left;
    const kind = panel.kinds[at], chunk = panel.chunk_of_stage[panel.stages[at]];
    context.fillStyle = shades[panel.chunks][kind][chunk];
    context.fillRect(left, top, Math.max(0.7, wide - (wide > 4 ? 1 : 0)), panel.bar);
    if (wide < 9 || panel.bar < 13) continue;
    // W is the widest letter: bars of equal width have either all letters or none.
    const letters = context.measureText(`W${panel.batches[at]}`).width <= wide - 5;
    const text = `${letters ? kind : ""}${panel.batches[at]}`, size = context.measureText(text).width;
    if (size > wide - 3) continue;
    context.fillStyle = texts[panel.chunks][kind][chunk];
    context.fillText(text, left + (wide - size) / 2, top + panel.bar / 2 + 0.5);
  }
  if (memory) drawMemory(context, panel, rank, begin, cssColour);
}

const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

// If there are more steps than pixels, each pixel gets the mean colour of its steps.
function drawBlend(context, panel, rank, begin, last, cssColour) {
  const width = Math.round(panel.plot * (devicePixelRatio || 1)), scale = width / panel.plot;
  const idle = channels(cssColour("idle")), fills = colours().fill[panel.chunks], rgb = {};
  for (const kind in fills) rgb[kind] = fills[kind].map(channels);
  const finish = (xOf(panel, panel.makespan) - panel.left) * scale;
  const sums = new Float32Array(4 * width);
  for (let at = begin; at < last; at++) {
    const colour = rgb[panel.kinds[at]][panel.chunk_of_stage[panel.stages[at]]];
    const left = Math.max(0, (xOf(panel, panel.start[at]) - panel.left) * scale);
    const right = Math.min(width, (xOf(panel, panel.end[at]) - panel.left) * scale);
    for (let x = Math.floor(left); x < right; x++) {
      const part = Math.min(right, x + 1) - Math.max(left, x);
      for (let i = 0; i < 3; i++) sums[4 * x + i] += part * colour[i];
      sums[4 * x + 3] += part;
    }
  }
  const strip = Object.assign(document.createElement("canvas"), { width, height: 1 });
  const image = new ImageData(width, 1);
  for (let x = 0; x < width; x++) {
    const rest = 1 - Math.min(1, sums[4 * x + 3]);
    for (let i = 0; i < 3; i++) image.data[4 * x + i] = sums[4 * x + i] + rest * idle[i];
    image.data[4 * x + 3] = x < finish ? 255 : 0;
  }
  strip.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(strip, panel.left, rank * panel.row, panel.plot, panel.bar);
}

function drawMemory(context, panel, rank, begin, cssColour) {
  const foot = rank * panel.row + panel.bar + panel.strip + 1;
  const high = (ticks) => (panel.strip * ticks) / (panel.peak || 1);
  context.fillStyle = cssColour("memory");
  context.beginPath();
  let level = begin > panel.first[rank] ? panel.after[begin - 1] : 0;
  let x = panel.left, covered = -1;
  context.moveTo(x, foot);
  for (let at = begin; at < panel.first[rank + 1] && panel.start[at] < toOf(panel); at++) {
    const left = xOf(panel, panel.start[at]), right = xOf(panel, panel.end[at]);
    if (right > covered + 0.5) {
      covered = right;
      context.lineTo(left, foot - high(level));
      context.lineTo(left, foot - high(panel.during[at]));
      context.lineTo(right, foot - high(panel.during[at]));
    }
    level = panel.after[at];
    x = right;
  }
  const finish = Math.min(xOf(panel, panel.makespan), panel.left + panel.plot);
  context.lineTo(x, foot - high(level));
  context.lineTo(Math.max(x, finish), foot - high(level));
  context.lineTo(Math.max(x, finish), foot);
  context.fill();
}

function drawAxis(context, panel, cssColour) {
  const base = panel.row * panel.ranks, span = view.to - view.from;
  const rough = (span / panel.plot) * 90, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const edge = panel.left + panel.plot;
  for (let k = Math.ceil(Math.max(0, fromOf(panel)) / step); k * step <= toOf(panel); k++) {
    const x = xOf(panel, k * step);
    context.fillStyle = cssColour("line");
    context.fillRect(Math.round(x), 0, 1, base + 4);
    const text = (k * step).toFixed(digits), size = context.measureText(text).width;
    context.fillStyle = cssColour("muted");
    context.fillText(text, Math.min(Math.max(x - size / 2, panel.left), edge - size), base + 11);
  }
  context.fillStyle = cssColour("muted");
  if (panel.left > 40) context.fillText(data.unit, 0, base + 11);
  // Scroll bar: the visible part of the whole time.
  if (span >= longest * 0.999) return;
  context.fillStyle = cssColour("line");
  context.fillRect(panel.left, base + 21, panel.plot, 3);
  context.fillStyle = cssColour("muted");
  context.fillRect(panel.left + (panel.plot * Math.max(0, fromOf(panel))) / longest, base + 21, Math.max(6, (panel.plot * span) / longest), 3);
}

// Steps to outline: the selected step, the step that it waited for, the same step in other panels.
function marks(panel) {
  if (selected.at < 0 || !panel.visible) return [];
  if (panel !== selected.panel) {
    const there = sameStep(selected.panel, panel, selected.at);
    return there < 0 ? [] : [{ at: there }];
  }
  const from = panel.awaited.get(selected.at);
  return from === undefined ? [{ at: selected.at }] : [{ at: from, to: selected.at }, { at: selected.at }];
}

function drawMark(context, panel, { at, to }, cssColour) {
  const box = (i) => [xOf(panel, panel.start[i]), panel.rank[i] * panel.row, Math.max(2, xOf(panel, panel.end[i]) - xOf(panel, panel.start[i]))];
  const [x, y, wide] = box(at);
  context.strokeStyle = cssColour("mark");
  context.lineWidth = to === undefined ? 2.5 : 1.5;
  context.strokeRect(x, y + 1, wide - 1, panel.bar - 2);
  if (to === undefined) return;
  const [tox, toy] = box(to);
  context.beginPath();
  context.moveTo(x + wide, y + panel.bar / 2);
  context.lineTo(tox, toy + panel.bar / 2);
  context.stroke();
}

let scheduled = false;
function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    panels.forEach((panel) => panel.visible && draw(panel));
  });
}
