"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const charts = new Map(); // canvas → its chart
  const named = (i) => data.names[i] || "pruned";
  let compared = 0; // which of data.trades is shown

  // --- numbers and axes

  const SUPERSCRIPT = [..."⁰¹²³⁴⁵⁶⁷⁸⁹"];
  const power = (value) => {
    const exponent = Math.round(Math.log10(value));
    if (Math.abs(value / 10 ** exponent - 1) > 1e-6) return "";
    if (Math.abs(exponent) < 3) return String(Number(value.toPrecision(3)));
    return `10${exponent < 0 ? "⁻" : ""}${[...String(Math.abs(exponent))].map((digit) => SUPERSCRIPT[digit]).join("")}`;
  };
  const brief = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)
    ? String(Number(value.toPrecision(4))) : value.toExponential(2));
  const axis = (text, more) => ({
    title: { display: true, text },
    grid: { color: colour("line") },
    border: { color: colour("strong") },
    ...more,
    ticks: { autoSkipPadding: 8, ...(more && more.ticks) },
  });
  const decades = (text, values, floor) => { // a logarithmic axis that begins and ends at powers of ten
    const positive = values.filter((value) => value > 0);
    const low = floor || Math.min(...positive), high = Math.max(...positive);
    const min = 10 ** Math.floor(Math.log10(low) + 1e-9), max = 10 ** Math.ceil(Math.log10(high) - 1e-9);
    const ticks = { callback: power, autoSkip: false, maxRotation: 0 };
    const grid = { color: ({ tick }) => (power(tick.value) ? colour("line") : "transparent") };
    return axis(text, { type: "logarithmic", min, max: max > min ? max : 10 * min, ticks, grid });
  };
  const blocks = (names) => axis("block", { grid: { display: false }, labels: names, type: "category", ticks: { maxRotation: 0 } });
  const tooltip = (callbacks, filter) => ({ filter, callbacks, displayColors: false, boxPadding: 4 });

  // --- the charts, by kind

  const trade = () => {
    const shown = data.trades[compared], several = data.names.length > 1;
    const all = [...shown.runs.filter(Boolean), ...shown.dense, ...shown.cut];
    const most = Math.max(...all.map(([macs]) => macs));
    const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => most >= size) || [1, ""];
    const point = ([x, y], run) => ({ x: x / unit, y, run });
    const runs = shown.runs.map((one, i) => one && point(one, i));
    const front = shown.front.map((i) => runs[i]);
    const others = runs.filter((one) => one && !front.includes(one));
    const marks = (label, points, style, hue, filled) => ({
      label, data: points, pointStyle: style, borderColor: hue, backgroundColor: filled ? hue : colour("card"),
      borderWidth: 2, radius: 6, hoverRadius: 8, hitRadius: 8, showLine: false,
    });
    const sets = several
      ? [marks("on the front", front, "circle", colour("accent"), true), marks("other runs", others, "circle", colour("soft"))]
      : [marks("pruned", front, "circle", colour("accent"), true)];
    if (several) Object.assign(sets[0], { showLine: front.length > 1 });
    if (shown.cut.length) sets.push(marks("cut, not repaired", shown.cut.map((one) => point(one)), "triangle", colour("before")));
    const dense = shown.dense.filter(([, value]) => !shown.log || value > 0);
    if (dense.length) sets.push(marks("dense", dense.map((one) => point(one)), "rectRot", colour("ink"), true));
    const values = all.map(([, value]) => value);
    const linear = axis(shown.axis, { grace: "8%" });
    const said = ({ raw, dataset }) => [
      `${brief(raw.x)} ${letter} MACs`, `${shown.label}: ${brief(raw.y)}${shown.axis.endsWith("%") ? "%" : ""}`,
    ].concat(several && raw.run !== undefined ? [dataset.label] : []);
    const title = ([{ raw, dataset }]) => (raw.run === undefined ? dataset.label : named(raw.run));
    return {
      type: "scatter",
      data: { datasets: sets.filter((one) => one.data.length) },
      options: {
        scales: {
          x: axis(`MACs of an image${letter && `, ${letter}`}`, { grace: "8%", ticks: { maxRotation: 0 } }),
          y: shown.log ? decades(shown.axis, values) : linear,
        },
        plugins: {
          legend: { display: true, align: "start", labels: { usePointStyle: true, boxHeight: 7, padding: 14 } },
          tooltip: tooltip({ title, label: said }),
        },
        onClick: (_, found) => {
          const hit = found.map(({ datasetIndex, index }) => sets.filter((one) => one.data.length)[datasetIndex].data[index]);
          if (several && hit.length && hit[0].run !== undefined) pick(hit[0].run, true);
        },
      },
    };
  };

  const sizes = ({ group, unit, kept, gone }, names) => {
    const said = ({ dataIndex: i }) => (gone ? `${kept[i]} of ${kept[i] + gone[i]} ${unit} kept` : `${kept[i]} merged`);
    const bar = (values, hue) => ({ data: values, backgroundColor: hue, barPercentage: 0.9, categoryPercentage: 0.9 });
    return {
      type: "bar",
      data: { datasets: [bar(kept, colour(group)), ...(gone ? [bar(gone, colour("gone"))] : [])] },
      options: {
        interaction: { mode: "index", intersect: false },
        scales: { x: { ...blocks(names), stacked: true }, y: axis(unit, { stacked: true, beginAtZero: true, ticks: { precision: 0 } }) },
        plugins: { tooltip: tooltip({ title: ([one]) => `block ${one.label}`, label: said }, (one) => one.datasetIndex === 0) },
      },
    };
  };

  const errors = ({ before, after }, names) => {
    const least = 1e-9, drawn = (values) => values.map((value) => (value === null ? null : Math.max(value, least)));
    const [first, last] = [drawn(before), drawn(after)];
    const dots = (values, hue, filled) => ({
      type: "line", data: values, showLine: false, borderColor: hue, backgroundColor: filled ? hue : colour("card"),
      pointRadius: 4, pointBorderWidth: 2, order: 1, clip: 6,
    });
    const spans = first.map((value, i) => (value === null ? null : [Math.min(value, last[i]), Math.max(value, last[i])]));
    const said = ({ dataIndex: i }) => [`not repaired: ${brief(before[i])}`, `repaired: ${brief(after[i])}`];
    return {
      type: "bar",
      data: {
        datasets: [
          dots(first, colour("before")), dots(last, colour("accent"), true),
          { type: "bar", data: spans, backgroundColor: colour("strong"), barThickness: 2, order: 2 },
        ],
      },
      options: {
        interaction: { mode: "index", intersect: false },
        scales: { x: { ...blocks(names), offset: true }, y: decades("relative error", [...first, ...last]) },
        plugins: { tooltip: tooltip({ title: ([one]) => `block ${one.label}`, label: said }, (one) => one.datasetIndex === 0) },
      },
    };
  };

  const rgb = (name) => colour(name).slice(1).match(/../g).map((pair) => parseInt(pair, 16));
  const ramp = (share) => { // a colour between the three of the ramp
    const [low, high] = share < 0.5 ? [rgb("ramp-0"), rgb("ramp-1")] : [rgb("ramp-1"), rgb("ramp-2")];
    const part = share < 0.5 ? 2 * share : 2 * share - 1;
    return `rgb(${low.map((value, i) => Math.round(value + part * (high[i] - value))).join(",")})`;
  };
  const curves = ({ unit, floor, top, lines }) => {
    const hues = lines.map((_, i) => ramp(lines.length > 1 ? i / (lines.length - 1) : 0.5));
    const line = ({ points }, i) => ({ data: points, borderColor: hues[i], borderWidth: 1.75, pointRadius: 0, hitRadius: 6, order: 2 });
    const chosen = {
      data: lines.map((one) => one.chosen), showLine: false, pointBackgroundColor: hues, borderColor: colour("ink"),
      pointBorderColor: colour("ink"), pointBorderWidth: 1, pointRadius: 4, hitRadius: 6, order: 1, clip: 6,
    };
    const title = ([{ datasetIndex: i, dataIndex: j }]) => `block ${(lines[i] || lines[j]).block}`;
    const said = ({ raw, datasetIndex: i, dataIndex: j }) =>
      `${i < lines.length ? `${brief(raw[0])}% kept` : `kept ${lines[j].said}`}: ${brief(raw[1])}`;
    return {
      type: "line",
      data: { datasets: [...lines.map(line), chosen] },
      options: {
        interaction: { mode: "nearest", intersect: false },
        scales: {
          x: axis(`${unit} kept, %`, { type: "linear", min: 0, max: 100, ticks: { stepSize: 25, maxRotation: 0 } }),
          y: decades("damage", [floor, top], floor),
        },
        plugins: { tooltip: { ...tooltip({ title, label: said }, (_, i) => i === 0) } },
      },
    };
  };

  const KINDS = { sizes, errors, curves };
  const draw = (canvas) => {
    const { kind, run, number } = canvas.dataset, found = data.details[run];
    const config = kind === "trade" ? trade() : KINDS[kind](found[kind][Number(number)], found.blocks);
    const old = charts.get(canvas);
    if (old) old.destroy();
    charts.set(canvas, new Chart(canvas, config));
  };
  const colours = () => {
    Object.assign(Chart.defaults, { color: colour("soft"), borderColor: colour("line"), animation: false, maintainAspectRatio: false });
    Chart.defaults.font.family = "system-ui, sans-serif";
    Chart.defaults.plugins.legend.display = false;
  };
  const redraw = () => {
    colours();
    charts.forEach((_, canvas) => draw(canvas));
  };

  const near = new IntersectionObserver((found) => { // draws a chart when it is about to be seen
    for (const { isIntersecting, target } of found) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "400px" });

  // --- which run is shown, and tables that sort

  const articles = [...document.querySelectorAll("article")], chooser = document.getElementById("run");
  function pick(run, move) {
    const shown = articles.find((one) => one.dataset.run === String(run));
    if (!shown) return;
    for (const one of articles) one.hidden = one !== shown;
    if (chooser) chooser.value = String(run);
    for (const canvas of shown.querySelectorAll("canvas")) if (!charts.has(canvas)) near.observe(canvas);
    if (move) chooser.closest("section").scrollIntoView({ block: "start" });
  }
  const order = (a, b) => {
    const [one, other] = [a, b].map((cell) => (cell.dataset.number === undefined ? null : Number(cell.dataset.number)));
    if (one !== null && other !== null) return one - other;
    const empty = (a.textContent.trim() === "") - (b.textContent.trim() === "");
    return empty || a.textContent.trim().localeCompare(b.textContent.trim(), "en", { numeric: true });
  };
  const sort = (heading) => {
    const column = heading.cellIndex, body = heading.closest("table").tBodies[0];
    const way = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    body.append(...[...body.rows].sort((a, b) => way * order(a.cells[column], b.cells[column])));
  };

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button && button.dataset.pick) pick(button.dataset.pick, true);
    else if (button && button.closest(".sorts thead")) sort(button.closest("th"));
  });
  if (chooser) chooser.addEventListener("change", () => pick(chooser.value));
  const measure = document.getElementById("measure"), large = document.querySelector('[data-kind="trade"]');
  if (measure) measure.addEventListener("change", () => { compared = Number(measure.value); draw(large); });
  addEventListener("beforeprint", () => {
    for (const canvas of document.querySelectorAll("canvas")) if (!charts.has(canvas) && canvas.offsetParent) draw(canvas);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  colours();
  if (large) draw(large);
  pick(chooser ? chooser.value : 0);
})();
