"use strict";
// The first half of the page's script: data as columns.py writes it, and how it is drawn, on one
// canvas per panel. The second half is page_acts.js.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const AXIS = 26;
const panels = data.panels.map(load);
const longest = Math.max(...panels.map((panel) => panel.makespan)) || 1;
const view = { from: 0, to: longest };
const chosen = { panel: null, at: -1, idle: false, pinned: false };
let memory = false;

// The columns, with times added up and the first step of each rank.
function load(written) {
  const count = written.kinds.length;
  const ranks = written.counts.length;
  const panel = {
    ...written, ranks, visible: true, places: null,
    start: new Float64Array(count), end: new Float64Array(count), rank: new Uint32Array(count),
    first: new Uint32Array(ranks + 1), awaited: new Map(written.waits),
  };
  panel.peak = 0;
  for (let rank = 0, at = 0; rank < ranks; rank++) {
    let now = 0;
    for (const last = at + written.counts[rank]; at < last; at++) {
      panel.start[at] = (now += written.gaps[at]) * written.tick;
      panel.end[at] = (now += written.times[at]) * written.tick;
      panel.rank[at] = rank;
      panel.peak = Math.max(panel.peak, written.during[at]);
    }
    panel.first[rank + 1] = at;
  }
  return panel;
}

// Words

const number = (value) => String(Number(value.toPrecision(5)));
const time = (value) => `${number(value)} ${data.unit}`;

function stepName(panel, at) {
  const words = data.words[panel.kinds[at]];
  const name = `${panel.kinds[at]}${panel.batches[at]} at stage ${panel.stages[at]}`;
  return { words: `${words} of micro-batch ${panel.batches[at]}`, name };
}

function waitOf(panel, at) {
  const waited = panel.gaps[at] * panel.tick;
  if (waited <= 0) return "nothing";
  const awaited = panel.awaited.get(at);
  if (awaited === undefined) return `${time(waited)}, for no other rank`;
  return `${time(waited)} for ${stepName(panel, awaited).name}, rank ${panel.rank[awaited]}`;
}

function held(panel, at) {
  const during = panel.during[at] * panel.memory_tick;
  const after = panel.after[at] * panel.memory_tick;
  const then = after === during ? "" : `, then ${number(after)}`;
  return `${number(during)} ${data.memory_unit}${then}`;
}

// The same step in another panel, -1 if it has none.
function sameStep(panel, other, at) {
  const key = (of, i) => `${of.kinds[i]}${of.batches[i]}@${of.stages[i]}`;
  if (!other.places) {
    other.places = new Map();
    for (let i = 0; i < other.kinds.length; i++) other.places.set(key(other, i), i);
  }
  return other.places.get(key(panel, at)) ?? -1;
}

function facts(panel, at) {
  const span = (of, i) =>
    `${number(of.start[i])} to ${number(of.end[i])} ${data.unit} (${number(of.end[i] - of.start[i])})`;
  const stages = Math.max(...panel.chunk_of_stage) + 1;
  const chunk = stages > 1 ? `, its stage ${panel.chunk_of_stage[panel.stages[at]] + 1} of ${stages}` : "";
  const rows = [
    ["stage", String(panel.stages[at])],
    ["rank", `${panel.rank[at]}${chunk}`],
    ["time", span(panel, at)],
    ["waited", waitOf(panel, at)],
    ["holds", held(panel, at)],
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

function measure(panel) {
  panel.width = panel.canvas.clientWidth;
  panel.left = panel.width < 560 ? 28 : 58;
  panel.plot = Math.max(20, panel.width - panel.left - 8);
  panel.bar = panel.ranks <= 8 ? 26 : panel.ranks <= 16 ? 20 : panel.ranks <= 32 ? 14 : 9;
  panel.strip = memory ? Math.max(8, Math.round(panel.bar * 0.8)) : 0;
  panel.row = panel.bar + panel.strip + (panel.bar > 9 ? 4 : 1);
  panel.height = panel.row * panel.ranks + AXIS;
}

const xOf = (panel, moment) => panel.left + ((moment - view.from) / (view.to - view.from)) * panel.plot;
const timeOf = (panel, x) => view.from + ((x - panel.left) / panel.plot) * (view.to - view.from);

function draw(panel) {
  measure(panel);
  const { canvas, width, height } = panel;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  Object.assign(canvas.dataset, { left: panel.left, plot: panel.plot, row: panel.row, from: view.from, to: view.to });
  const pen = canvas.getContext("2d");
  const css = getComputedStyle(document.documentElement);
  const paint = (name) => css.getPropertyValue(`--${name}`).trim();
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  drawAxis(pen, panel, paint);
  pen.fillStyle = paint("soft");
  const every = Math.max(1, Math.ceil(14 / panel.row));
  for (let rank = 0; rank < panel.ranks; rank += every) {
    pen.fillText(panel.left > 40 ? `rank ${rank}` : String(rank), 0, Math.max(7, rank * panel.row + panel.bar / 2));
  }
  pen.save();
  pen.beginPath();
  pen.rect(panel.left, 0, panel.plot, height);
  pen.clip();
  for (let rank = 0; rank < panel.ranks; rank++) drawRank(pen, panel, rank, paint);
  for (const mark of marks(panel)) drawMark(pen, panel, mark, paint);
  pen.restore();
}

// The first step of a rank that ends after a moment.
function firstAfter(panel, rank, moment) {
  let low = panel.first[rank], high = panel.first[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (panel.end[middle] > moment) high = middle; else low = middle + 1;
  }
  return low;
}

function drawRank(pen, panel, rank, paint) {
  const top = rank * panel.row, shades = colours().fill, inks = colours().ink;
  const finish = xOf(panel, panel.makespan);
  pen.fillStyle = paint("idle");
  pen.fillRect(xOf(panel, 0), top, finish - xOf(panel, 0), panel.bar);
  const begin = firstAfter(panel, rank, view.from);
  const last = Math.min(firstAfter(panel, rank, view.to) + 1, panel.first[rank + 1]);
  if (last - begin > panel.plot / 2) drawBlend(pen, panel, rank, begin, last, paint);
  for (let at = begin; last - begin <= panel.plot / 2 && at < last; at++) {
    const left = xOf(panel, panel.start[at]), wide = xOf(panel, panel.end[at]) - left;
    const kind = panel.kinds[at], chunk = panel.chunk_of_stage[panel.stages[at]];
    pen.fillStyle = shades[panel.chunks][kind][chunk];
    pen.fillRect(left, top, Math.max(0.7, wide - (wide > 4 ? 1 : 0)), panel.bar);
    if (wide < 9 || panel.bar < 13) continue;
    const text = String(panel.batches[at]), size = pen.measureText(text).width;
    if (size > wide - 3) continue;
    pen.fillStyle = inks[panel.chunks][kind][chunk];
    pen.fillText(text, left + (wide - size) / 2, top + panel.bar / 2 + 0.5);
  }
  if (memory) drawMemory(pen, panel, rank, begin, paint);
}

const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

// Steps too thin to tell apart: each pixel gets the mean colour of what runs in it.
function drawBlend(pen, panel, rank, begin, last, paint) {
  const width = Math.round(panel.plot * (devicePixelRatio || 1)), scale = width / panel.plot;
  const idle = channels(paint("idle")), fills = colours().fill[panel.chunks], rgb = {};
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
  pen.imageSmoothingEnabled = false;
  pen.drawImage(strip, panel.left, rank * panel.row, panel.plot, panel.bar);
}

function drawMemory(pen, panel, rank, begin, paint) {
  const foot = rank * panel.row + panel.bar + panel.strip + 1;
  const high = (ticks) => (panel.strip * ticks) / (panel.peak || 1);
  pen.fillStyle = paint("held");
  pen.beginPath();
  let level = begin > panel.first[rank] ? panel.after[begin - 1] : 0;
  let x = panel.left, covered = -1;
  pen.moveTo(x, foot);
  for (let at = begin; at < panel.first[rank + 1] && panel.start[at] < view.to; at++) {
    const left = xOf(panel, panel.start[at]), right = xOf(panel, panel.end[at]);
    if (right > covered + 0.5) {
      covered = right;
      pen.lineTo(left, foot - high(level));
      pen.lineTo(left, foot - high(panel.during[at]));
      pen.lineTo(right, foot - high(panel.during[at]));
    }
    level = panel.after[at];
    x = right;
  }
  const finish = Math.min(xOf(panel, panel.makespan), panel.left + panel.plot);
  pen.lineTo(x, foot - high(level));
  pen.lineTo(Math.max(x, finish), foot - high(level));
  pen.lineTo(Math.max(x, finish), foot);
  pen.fill();
}

function drawAxis(pen, panel, paint) {
  const base = panel.row * panel.ranks, span = view.to - view.from;
  const rough = (span / panel.plot) * 90, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const edge = panel.left + panel.plot;
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    const x = xOf(panel, k * step);
    pen.fillStyle = paint("line");
    pen.fillRect(Math.round(x), 0, 1, base + 4);
    const text = (k * step).toFixed(digits), size = pen.measureText(text).width;
    pen.fillStyle = paint("soft");
    pen.fillText(text, Math.min(Math.max(x - size / 2, panel.left), edge - size), base + 11);
  }
  pen.fillStyle = paint("soft");
  if (panel.left > 40) pen.fillText(data.unit, 0, base + 11);
  // Where on the whole the window lies.
  if (span >= longest * 0.999) return;
  pen.fillStyle = paint("line");
  pen.fillRect(panel.left, base + 21, panel.plot, 3);
  pen.fillStyle = paint("soft");
  pen.fillRect(panel.left + (panel.plot * view.from) / longest, base + 21, Math.max(6, (panel.plot * span) / longest), 3);
}

// What is outlined in a panel: the chosen step, what it waited for, the same step elsewhere.
function marks(panel) {
  if (chosen.at < 0 || !panel.visible) return [];
  if (panel !== chosen.panel) {
    const there = sameStep(chosen.panel, panel, chosen.at);
    return there < 0 ? [] : [{ at: there }];
  }
  const from = panel.awaited.get(chosen.at);
  return from === undefined ? [{ at: chosen.at }] : [{ at: from, to: chosen.at }, { at: chosen.at }];
}

function drawMark(pen, panel, { at, to }, paint) {
  const box = (i) => [xOf(panel, panel.start[i]), panel.rank[i] * panel.row, Math.max(2, xOf(panel, panel.end[i]) - xOf(panel, panel.start[i]))];
  const [x, y, wide] = box(at);
  pen.strokeStyle = paint("mark");
  pen.lineWidth = to === undefined ? 2.5 : 1.5;
  pen.strokeRect(x, y + 1, wide - 1, panel.bar - 2);
  if (to === undefined) return;
  const [tox, toy] = box(to);
  pen.beginPath();
  pen.moveTo(x + wide, y + panel.bar / 2);
  pen.lineTo(tox, toy + panel.bar / 2);
  pen.stroke();
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    panels.forEach((panel) => panel.visible && draw(panel));
  });
}
