"use strict";
// Draws the charts of a report as SVG. The data of each <figure> is in its attribute data-chart, and
// what all charts share in data-run of <body>.

const COLORS = ["#2563eb", "#dc6803", "#0891b2", "#9333ea", "#a16207", "#db2777", "#65a30d", "#64748b"];
const MARKS = { lost: "#b42318", joined: "#16803c", restarted: "#7c2d12", interrupted: "#101828" };
const RUN = JSON.parse(document.body.dataset.run);
const HEIGHT = 240, LEFT = 64, RIGHT = 28, TOP = 8, BOTTOM = 26;

function add(parent, name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  node.textContent = text;
  return parent.appendChild(node);
}

function ticks(low, high, count, isWhole) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  let step = [1, 2, 5, 10].find((n) => n * power * count >= high - low) * power;
  if (isWhole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(+(n * step).toPrecision(10));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const n of high - low < 4 ? [1, 2, 5] : [1]) found.push(+`${n}e${power}`);
  }
  return found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
}

function range(chart) {
  const values = chart.lines.flatMap(([, points]) =>
    points.flatMap((point) => point.slice(point.length === 4 ? 2 : 1)));
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}

function draw(figure, chart) {
  const svg = figure.querySelector("svg"), width = figure.clientWidth, bottom = HEIGHT - BOTTOM;
  const isLog = figure.classList.contains("log"), scale = isLog ? Math.log10 : (value) => value;
  let [low, high] = range(chart).map(scale); // within 1e-7, they differ only by rounding
  const room = high - low > 1e-7 * Math.abs(high) ? 0.06 * (high - low) : 0.2 * Math.abs(high) || 1;
  [low, high] = [chart.starts_at_0 ? 0 : low - room, high + room];
  const [first, last] = RUN.steps;
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((high - scale(value)) / (high - low)) * (bottom - TOP);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  for (const value of isLog ? logTicks(low, high) : ticks(low, high, 5, chart.is_whole)) {
    add(svg, "path", { class: "grid", d: `M${LEFT},${y(value)}H${width - RIGHT}` });
    add(svg, "text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value);
  }
  for (const step of ticks(first, last, width / 90, true)) {
    add(svg, "text", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, step);
  }
  add(svg, "text", { x: 0, y: HEIGHT - 8 }, "step");
  const stops = RUN.marks.filter(([, kind]) => kind === "interrupted").map(([step]) => step);
  chart.lines.forEach(([name, points], index) => {
    const color = COLORS[index % COLORS.length];
    let path = "", before = Infinity;
    for (const point of points) {
      if (point.length === 4) { // a part of a stack: two steps and two values
        const [from, to, base, top] = point, size = { width: x(to) - x(from), height: y(base) - y(top) };
        add(svg, "rect", { x: x(from), y: y(top), fill: color, ...size });
      } else {
        const [step, value] = point, isGap = stops.some((stop) => before <= stop && stop < step);
        if (path && chart.is_whole) path += `H${x(step)}V${y(value)}`;
        else path += `${path && !isGap ? "L" : "M"}${x(step)},${y(value)}`;
        before = step;
        if (points.length > 200) continue;
        const dot = add(svg, "circle", { cx: x(point[0]), cy: y(point[1]), r: 3, fill: color });
        add(dot, "title", {}, `${name}, step ${point[0]}: ${+point[1].toPrecision(6)}`);
      }
    }
    if (path) add(svg, "path", { class: "line", stroke: color, d: path });
  });
  for (const [step, kind, text] of RUN.marks) {
    const attributes = { class: "mark", stroke: MARKS[kind], d: `M${x(step)},${TOP}V${bottom}` };
    add(add(svg, "path", attributes), "title", {}, text);
  }
}

function legend(figure, names, colors) {
  names.forEach((name, index) => {
    const entry = figure.querySelector("figcaption").appendChild(document.createElement("span"));
    entry.style.setProperty("--color", colors[index % colors.length]);
    entry.textContent = name;
  });
}

for (const figure of document.querySelectorAll("figure")) {
  const chart = JSON.parse(figure.dataset.chart), kinds = Object.keys(MARKS);
  const marked = kinds.filter((kind) => RUN.marks.some((mark) => mark[1] === kind));
  legend(figure, chart.lines.map(([name]) => name), COLORS);
  legend(figure, marked, marked.map((kind) => MARKS[kind]));
  if (range(chart)[0] > 0 && !chart.starts_at_0) {
    const button = document.createElement("button");
    button.textContent = "log";
    button.onclick = () => draw(figure, chart, figure.classList.toggle("log"));
    figure.querySelector("figcaption").append(button);
  }
  draw(figure, chart);
  for (const event of ["load", "resize"]) addEventListener(event, () => draw(figure, chart));
}
