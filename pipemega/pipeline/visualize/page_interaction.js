// Handles pointer, touch, wheel and keyboard input, and builds the page. Loaded after page_drawing.js.

// Scrolling and zooming

function setView(from, to, phase = "") {
  const span = Math.min(longest, Math.max(to - from, longest * 1e-6));
  view.from = Math.min(Math.max(0, from), longest - span);
  view.to = view.from + span;
  view.phase = span === longest ? "all" : phase;
  if (span === longest) for (const panel of panels) panel.shift = 0;
  showView();
  redraw();
}

// Shows a phase of every panel, as long as that of the first visible one.
// Warm-up: until each rank has begun its first backward. Cool-down: after the first rank has no more forwards.
// Steady: the middle between the two, as long as the warm-up, so that steps have the same width; at most 40 steps.
const PHASES = {
  warm: ({ phases }) => [0, 1.15 * phases.warm],
  steady: ({ phases: { warm, cool }, makespan, kinds, ranks }) => {
    const middle = (warm + cool) / 2, most = (40 * makespan * ranks) / kinds.length;
    const half = Math.min(1.15 * warm, cool - warm, most) / 2;
    return [middle - half, middle + half];
  },
  cool: ({ phases, makespan }) => [makespan - 1.15 * (makespan - phases.cool), makespan],
};

// The point of a panel that is aligned with that of the other panels.
const ALIGNED = {
  warm: () => 0,
  steady: ({ phases }) => (phases.warm + phases.cool) / 2,
  cool: ({ makespan }) => makespan,
};

const firstVisible = () => panels.find((panel) => panel.visible) ?? panels[0];

function showPhase(phase) {
  const first = firstVisible();
  if (document.getElementById(phase).disabled) return;
  const [from, to] = PHASES[phase](first);
  // The panel with the longest time has no shift in the cool-down, so that the view stays within the whole time.
  const base = phase === "cool" ? longest : ALIGNED[phase](first);
  for (const panel of panels) panel.shift = panel.phases ? ALIGNED[phase](panel) - base : 0;
  setView(from - first.shift, to - first.shift, phase);
}

// Shows in the toolbar which part of the step is visible.
function showView() {
  const first = firstVisible(), phases = first.phases;
  const range = [fromOf(first), toOf(first)].map((moment) => Number(moment.toPrecision(4)));
  document.getElementById("range").textContent =
    `${range[0]} to ${range[1]} of ${Number(first.makespan.toPrecision(4))} ${data.unit}`;
  document.getElementById("phases").hidden = panels.every((panel) => !panel.phases);
  for (const phase of ["warm", "steady", "cool", "all"]) {
    const button = document.getElementById(phase);
    button.setAttribute("aria-pressed", String(view.phase === phase));
    button.disabled = phase !== "all" && (!phases || (phase === "steady" && phases.cool <= phases.warm));
  }
}

// Zooming keeps the start of the selected step in place if visible, else the middle of the view.
function zoomCentre() {
  const start = selected.at < 0 ? -1 : selected.panel.start[selected.at] - selected.panel.shift;
  return start >= view.from && start <= view.to ? start : (view.from + view.to) / 2;
}

function zoom(factor, around = zoomCentre()) {
  const span = Math.min(longest, (view.to - view.from) / factor);
  const part = (around - view.from) / (view.to - view.from);
  setView(around - part * span, around + (1 - part) * span);
}

const pan = (part) => setView(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));

// Selecting

function select(panel, at, { idle = false, pinned = selected.pinned, x = null, y = null } = {}) {
  Object.assign(selected, { panel, at, idle, pinned });
  showDetails(x, y);
  redraw();
}

const unselect = () => select(null, -1, { pinned: false });

function showDetails(x, y) {
  const { panel, at, idle } = selected, detail = document.getElementById("detail");
  detail.hidden = at < 0;
  if (at < 0) return;
  const head = document.createElement("b"), swatch = document.createElement("i");
  const list = document.createElement("div"), chunk = panel.chunk_of_stage[panel.stages[at]];
  let rows = details(panel, at);
  if (idle) {
    swatch.style.background = "var(--idle)";
    head.append(swatch, `rank ${panel.rank[at]} is idle`);
    rows = [["waits", waitText(panel, at)], ["before", stepName(panel, at).long]];
  } else {
    swatch.style.background = colours().fill[panel.chunks][panel.kinds[at]][chunk];
    head.append(swatch, stepName(panel, at).long);
  }
  for (const cell of rows.flat()) list.append(Object.assign(document.createElement("span"), { textContent: cell }));
  detail.replaceChildren(head, list);
  const box = detail.getBoundingClientRect();
  const frame = panel.canvas.getBoundingClientRect();
  x ??= frame.left + Math.max(panel.left, xOf(panel, panel.start[at]));
  y ??= frame.top + (panel.rank[at] + 1) * panel.row;
  detail.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 12))}px`;
  const below = y + 16 + box.height < innerHeight;
  detail.style.top = `${Math.max(8, below ? y + 16 : y - box.height - 16)}px`;
}

// On a small screen the details cover the bottom of the page: scroll if they hide the step.
function scrollToStep() {
  const { panel, at } = selected, box = document.getElementById("detail").getBoundingClientRect();
  if (at < 0 || innerWidth > 639) return;
  const foot = panel.canvas.getBoundingClientRect().top + (panel.rank[at] + 1) * panel.row;
  if (foot > box.top - 8) scrollBy(0, foot - box.top + 8);
}

// The step at a point of the canvas; if the rank is idle there, the next step.
function stepAt(panel, event) {
  const frame = panel.canvas.getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  const rank = Math.floor(y / panel.row), moment = timeOf(panel, x);
  if (rank < 0 || rank >= panel.ranks || x < panel.left || moment > panel.makespan) return { at: -1, idle: false };
  const at = firstAfter(panel, rank, moment);
  if (at === panel.first[rank + 1]) return { at: -1, idle: false };
  return { at, idle: panel.start[at] > moment };
}

function moveSelection(panel, key) {
  let at = selected.panel === panel ? selected.at : -1;
  if (at < 0) {
    at = firstAfter(panel, 0, fromOf(panel));
  } else if (key === "ArrowLeft" || key === "ArrowRight") {
    const next = at + (key === "ArrowLeft" ? -1 : 1), rank = panel.rank[at];
    if (next >= panel.first[rank] && next < panel.first[rank + 1]) at = next;
  } else {
    const rank = panel.rank[at] + (key === "ArrowUp" ? -1 : 1);
    if (rank < 0 || rank >= panel.ranks || panel.counts[rank] === 0) return;
    at = Math.min(firstAfter(panel, rank, panel.start[at]), panel.first[rank + 1] - 1);
  }
  const span = view.to - view.from;
  const start = panel.start[at] - panel.shift, end = panel.end[at] - panel.shift;
  if (start < view.from) setView(start, start + span);
  if (end > view.to) setView(end - span, end);
  select(panel, at, { pinned: true });
  scrollToStep();
}

// Events

function listen(panel) {
  const { canvas } = panel, down = new Map();
  let moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event);
    moved = down.size > 1;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) {
      if (!selected.pinned) select(panel, stepAt(panel, event).at, { ...stepAt(panel, event), x: event.clientX, y: event.clientY });
      return;
    }
    if (down.size === 1) {
      if (!moved && Math.abs(event.clientX - before.clientX) < 4) return;
      moved = true;
      canvas.classList.add("moving");
      pan((before.clientX - event.clientX) / panel.plot);
    } else if (down.size === 2) {
      const frame = canvas.getBoundingClientRect();
      const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, pointer]) => pointer);
      const apart = (pointer) => Math.max(20, Math.abs(pointer.clientX - other.clientX));
      zoom(apart(event) / apart(before), timeOf(panel, (event.clientX + other.clientX) / 2 - frame.left) - panel.shift);
    }
    down.set(event.pointerId, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    down.delete(event.pointerId);
    canvas.classList.remove("moving");
    if (moved) return;
    const found = stepAt(panel, event);
    const again = selected.pinned && selected.panel === panel && selected.at === found.at;
    if (found.at < 0 || again) unselect();
    else select(panel, found.at, { ...found, pinned: true, x: event.clientX, y: event.clientY });
    scrollToStep();
  });
  canvas.addEventListener("pointercancel", (event) => {
    down.delete(event.pointerId);
    canvas.classList.remove("moving");
  });
  canvas.addEventListener("pointerleave", () => selected.pinned || unselect());
  canvas.addEventListener("wheel", (event) => {
    const frame = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey || (document.activeElement === canvas && !event.shiftKey && !event.deltaX)) {
      zoom(Math.exp(-event.deltaY / 300), timeOf(panel, event.clientX - frame.left) - panel.shift);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / panel.plot);
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6),
      0: () => setView(0, longest), w: () => showPhase("warm"), s: () => showPhase("steady"), c: () => showPhase("cool"),
      PageUp: () => pan(-0.5), PageDown: () => pan(0.5),
      Escape: () => (selected.at < 0 ? canvas.blur() : unselect()),
    };
    const act = event.key.startsWith("Arrow") ? () => moveSelection(panel, event.key) : keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

// Building the page

function addCheckbox(label, checked, change) {
  const box = Object.assign(document.createElement("input"), { type: "checkbox", checked });
  const wrapper = document.createElement("label");
  box.addEventListener("change", () => change(box.checked));
  wrapper.append(box, label);
  document.getElementById("shown").append(wrapper);
}

function build(panel) {
  const section = document.createElement("section"), header = document.createElement("header");
  const title = Object.assign(document.createElement("h2"), { textContent: panel.title });
  const summary = Object.assign(document.createElement("span"), { textContent: panel.summary });
  panel.canvas = Object.assign(document.createElement("canvas"), { tabIndex: 0 });
  panel.canvas.setAttribute("role", "application");
  panel.canvas.setAttribute("aria-label", `timeline of ${panel.title}, ${panel.summary}; arrow keys select an instruction`);
  if (panel.mark) {
    title.append(Object.assign(document.createElement("span"), { className: "mark", textContent: panel.mark }));
    section.className = "marked";
  }
  section.hidden = !panel.visible;
  header.append(title, summary);
  section.append(header, panel.canvas);
  document.getElementById("timelines").append(section);
  listen(panel);
  if (panels.length > 1) {
    addCheckbox(panel.short, panel.visible, (on) => {
      panel.visible = on;
      section.hidden = !on;
      longest = longestVisible();
      if (view.phase in PHASES) showPhase(view.phase);
      else setView(view.from, view.phase === "all" ? longest : view.to);
      legend();
      unselect();
    });
  }
}

function legend() {
  const place = document.getElementById("legend"), seen = panels.filter((panel) => panel.visible);
  const chunks = Math.max(1, ...seen.map((panel) => panel.chunks));
  place.replaceChildren();
  const entry = (fills, label) => {
    const item = document.createElement("span");
    for (const fill of fills) item.append(Object.assign(document.createElement("i"), { style: `background: ${fill}` }));
    item.append(label);
    place.append(item);
  };
  for (const [kind, name] of Object.entries(data.kind_names)) {
    if (seen.some((panel) => panel.kinds.includes(kind))) entry(colours().fill[chunks][kind], `${kind} ${name}`);
  }
  for (const [name, colour] of Object.entries(data.phases)) {
    const drawn = seen.some((panel) => panel.outside.some((rank) => rank.some((phase) => phase[0] === name)));
    if (drawn) entry([colour], name);
  }
  entry(["var(--idle)"], "idle");
  if (chunks > 1) place.append("shades: first to last stage of the rank");
}

panels.forEach(build);
addCheckbox("memory", false, (on) => {
  memory = on;
  redraw();
});
const buttons = { in: () => zoom(1.6), out: () => zoom(1 / 1.6), left: () => pan(-0.5), right: () => pan(0.5), all: () => setView(0, longest) };
for (const phase in PHASES) buttons[phase] = () => showPhase(phase);
for (const [id, act] of Object.entries(buttons)) document.getElementById(id).addEventListener("click", act);
addEventListener("scroll", () => selected.at >= 0 && showDetails(null, null), { passive: true });
dark.addEventListener("change", () => (legend(), redraw()));
new ResizeObserver(redraw).observe(document.getElementById("timelines"));
legend();
showView();
redraw();
// More steps than this in a row are too narrow to be told apart.
if (Math.max(...panels.map((panel) => panel.kinds.length / panel.ranks)) > 300) showPhase("steady");
