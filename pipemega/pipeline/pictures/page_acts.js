// The second half of the page's script: what it does when it is pointed at, moved, zoomed or typed to.

// Moving and zooming

function look(from, to) {
  const span = Math.min(longest, Math.max(to - from, longest * 1e-6));
  view.from = Math.min(Math.max(0, from), longest - span);
  view.to = view.from + span;
  redraw();
}

// What is chosen stays where it is, and else the middle.
function centre() {
  const start = chosen.at < 0 ? -1 : chosen.panel.start[chosen.at];
  return start >= view.from && start <= view.to ? start : (view.from + view.to) / 2;
}

function zoom(factor, around = centre()) {
  const span = Math.min(longest, (view.to - view.from) / factor);
  const part = (around - view.from) / (view.to - view.from);
  look(around - part * span, around + (1 - part) * span);
}

const shift = (part) => look(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));

// Choosing

function choose(panel, at, { idle = false, pinned = chosen.pinned, x = null, y = null } = {}) {
  Object.assign(chosen, { panel, at, idle, pinned });
  tell(x, y);
  redraw();
}

const forget = () => choose(null, -1, { pinned: false });

function tell(x, y) {
  const { panel, at, idle } = chosen, detail = document.getElementById("detail");
  detail.hidden = at < 0;
  if (at < 0) return;
  const head = document.createElement("b"), swatch = document.createElement("i");
  const list = document.createElement("div"), chunk = panel.chunk_of_stage[panel.stages[at]];
  let rows = facts(panel, at);
  if (idle) {
    swatch.style.background = "var(--idle)";
    head.append(swatch, `rank ${panel.rank[at]} waits`);
    rows = [["waits", waitOf(panel, at)], ["before", stepName(panel, at).words]];
  } else {
    swatch.style.background = colours().fill[panel.chunks][panel.kinds[at]][chunk];
    head.append(swatch, stepName(panel, at).words);
  }
  for (const cell of rows.flat()) list.append(Object.assign(document.createElement("span"), { textContent: cell }));
  detail.replaceChildren(head, list);
  const room = detail.getBoundingClientRect();
  const frame = panel.canvas.getBoundingClientRect();
  x ??= frame.left + Math.max(panel.left, xOf(panel, panel.start[at]));
  y ??= frame.top + (panel.rank[at] + 1) * panel.row;
  detail.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - room.width - 12))}px`;
  const below = y + 16 + room.height < innerHeight;
  detail.style.top = `${Math.max(8, below ? y + 16 : y - room.height - 16)}px`;
}

// On a small screen what is told lies over the foot of the page: not over what it tells of.
function uncover() {
  const { panel, at } = chosen, box = document.getElementById("detail").getBoundingClientRect();
  if (at < 0 || innerWidth > 639) return;
  const foot = panel.canvas.getBoundingClientRect().top + (panel.rank[at] + 1) * panel.row;
  if (foot > box.top - 8) scrollBy(0, foot - box.top + 8);
}

// The step under a point of the canvas; or the one that the rank waits to begin there.
function under(panel, event) {
  const frame = panel.canvas.getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  const rank = Math.floor(y / panel.row), moment = timeOf(panel, x);
  if (rank < 0 || rank >= panel.ranks || x < panel.left || moment > panel.makespan) return { at: -1, idle: false };
  const at = firstAfter(panel, rank, moment);
  if (at === panel.first[rank + 1]) return { at: -1, idle: false };
  return { at, idle: panel.start[at] > moment };
}

function walk(panel, key) {
  let at = chosen.panel === panel ? chosen.at : -1;
  if (at < 0) {
    at = firstAfter(panel, 0, view.from);
  } else if (key === "ArrowLeft" || key === "ArrowRight") {
    const next = at + (key === "ArrowLeft" ? -1 : 1), rank = panel.rank[at];
    if (next >= panel.first[rank] && next < panel.first[rank + 1]) at = next;
  } else {
    const rank = panel.rank[at] + (key === "ArrowUp" ? -1 : 1);
    if (rank < 0 || rank >= panel.ranks || panel.counts[rank] === 0) return;
    at = Math.min(firstAfter(panel, rank, panel.start[at]), panel.first[rank + 1] - 1);
  }
  const span = view.to - view.from;
  if (panel.start[at] < view.from) look(panel.start[at], panel.start[at] + span);
  if (panel.end[at] > view.to) look(panel.end[at] - span, panel.end[at]);
  choose(panel, at, { pinned: true });
  uncover();
}

// Listening

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
      if (!chosen.pinned) choose(panel, under(panel, event).at, { ...under(panel, event), x: event.clientX, y: event.clientY });
      return;
    }
    if (down.size === 1) {
      if (!moved && Math.abs(event.clientX - before.clientX) < 4) return;
      moved = true;
      canvas.classList.add("moving");
      shift((before.clientX - event.clientX) / panel.plot);
    } else if (down.size === 2) {
      const frame = canvas.getBoundingClientRect();
      const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, pointer]) => pointer);
      const apart = (pointer) => Math.max(20, Math.abs(pointer.clientX - other.clientX));
      zoom(apart(event) / apart(before), timeOf(panel, (event.clientX + other.clientX) / 2 - frame.left));
    }
    down.set(event.pointerId, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    down.delete(event.pointerId);
    canvas.classList.remove("moving");
    if (moved) return;
    const found = under(panel, event);
    const again = chosen.pinned && chosen.panel === panel && chosen.at === found.at;
    if (found.at < 0 || again) forget();
    else choose(panel, found.at, { ...found, pinned: true, x: event.clientX, y: event.clientY });
    uncover();
  });
  canvas.addEventListener("pointercancel", (event) => {
    down.delete(event.pointerId);
    canvas.classList.remove("moving");
  });
  canvas.addEventListener("pointerleave", () => chosen.pinned || forget());
  canvas.addEventListener("wheel", (event) => {
    const frame = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey || (document.activeElement === canvas && !event.shiftKey && !event.deltaX)) {
      zoom(Math.exp(-event.deltaY / 300), timeOf(panel, event.clientX - frame.left));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      shift((event.deltaX || event.deltaY) / panel.plot);
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6),
      0: () => look(0, longest), PageUp: () => shift(-0.5), PageDown: () => shift(0.5),
      Escape: () => (chosen.at < 0 ? canvas.blur() : forget()),
    };
    const act = event.key.startsWith("Arrow") ? () => walk(panel, event.key) : keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

// Building

function tick(label, checked, change) {
  const box = Object.assign(document.createElement("input"), { type: "checkbox", checked });
  const whole = document.createElement("label");
  box.addEventListener("change", () => change(box.checked));
  whole.append(box, label);
  document.getElementById("shown").append(whole);
}

function build(panel) {
  const section = document.createElement("section"), header = document.createElement("header");
  const title = Object.assign(document.createElement("h2"), { textContent: panel.title });
  const figures = Object.assign(document.createElement("span"), { textContent: panel.figures });
  panel.canvas = Object.assign(document.createElement("canvas"), { tabIndex: 0 });
  panel.canvas.setAttribute("role", "application");
  panel.canvas.setAttribute("aria-label", `timeline of ${panel.title}, ${panel.figures}; arrow keys go from step to step`);
  header.append(title, figures);
  section.append(header, panel.canvas);
  document.getElementById("timelines").append(section);
  listen(panel);
  if (panels.length > 1) {
    tick(panel.short, true, (on) => {
      panel.visible = on;
      section.hidden = !on;
      forget();
    });
  }
}

function legend() {
  const place = document.getElementById("legend"), chunks = Math.max(...panels.map((panel) => panel.chunks));
  place.replaceChildren();
  const entry = (fills, words) => {
    const whole = document.createElement("span");
    for (const fill of fills) whole.append(Object.assign(document.createElement("i"), { style: `background: ${fill}` }));
    whole.append(words);
    place.append(whole);
  };
  for (const [kind, words] of Object.entries(data.words)) {
    if (panels.some((panel) => panel.kinds.includes(kind))) entry(colours().fill[chunks][kind], words);
  }
  entry(["var(--idle)"], "waiting");
  if (chunks > 1) place.append("shades: first to last stage of a rank");
}

panels.forEach(build);
tick("memory", false, (on) => {
  memory = on;
  redraw();
});
const buttons = { in: () => zoom(1.6), out: () => zoom(1 / 1.6), left: () => shift(-0.5), right: () => shift(0.5), whole: () => look(0, longest) };
for (const [id, act] of Object.entries(buttons)) document.getElementById(id).addEventListener("click", act);
addEventListener("scroll", () => chosen.at >= 0 && tell(null, null), { passive: true });
dark.addEventListener("change", () => (legend(), redraw()));
new ResizeObserver(redraw).observe(document.getElementById("timelines"));
legend();
redraw();
