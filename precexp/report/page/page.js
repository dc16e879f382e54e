"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // ---------------------------------------------------------------- tables

  const NOTHING = new Set(["", "–", "not measured"]);
  const LEADING = /^[+-]?(\d[\d,]*\.?\d*|\.\d+)(e[+-]?\d+)?(?=$|[\s%(;])/i;

  /** What a cell sorts by: null for nothing, NaN for words. */
  function numberOf(text) {
    if (NOTHING.has(text)) return null;
    if (/^(never|\+?inf|nan)$/.test(text)) return Infinity;
    if (text === "-inf") return -Infinity;
    const found = text.replace("−", "-").match(LEADING);
    return found ? Number(found[0].replaceAll(",", "")) : NaN;
  }

  function sortBy(table, column, descending) {
    const body = table.tBodies[0];
    if (!body) return;
    const rows = [...body.rows].map((row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, number: numberOf(text) };
    });
    const there = rows.filter(({ number }) => number !== null);
    const numeric = 2 * there.filter(({ number }) => !Number.isNaN(number)).length > there.length;
    if (numeric) for (const found of there) if (Number.isNaN(found.number)) found.number = Infinity;
    const sign = descending ? -1 : 1;
    rows.sort((a, b) => {
      if (a.number === null || b.number === null) return (a.number === null) - (b.number === null);
      if (numeric) return a.number === b.number ? 0 : sign * (a.number < b.number ? -1 : 1);
      return sign * a.text.localeCompare(b.text, "en", { numeric: true });
    });
    body.append(...rows.map(({ row }) => row));
    for (const [i, head] of [...table.tHead.rows[0].cells].entries()) {
      const order = i === column ? (descending ? "descending" : "ascending") : "none";
      head.setAttribute("aria-sort", order);
    }
  }

  function toTsv(table) {
    const lines = [...table.rows].map((row) =>
      [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " ")).join("\t"));
    return lines.join("\n") + "\n";
  }

  /** The clipboard may be refused to a file: page; the old command then still works. */
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.style.position = "fixed";
      area.style.opacity = "0";
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }

  for (const table of all(".table table")) {
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () =>
        sortBy(table, column, head.getAttribute("aria-sort") === "ascending"));
    }
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.title = "Copy the table as tab-separated values";
    button.addEventListener("click", async () => {
      button.textContent = (await copy(toTsv(table))) ? "copied" : "not allowed here";
      setTimeout(() => { button.textContent = "copy"; }, 1600);
    });
    const tools = document.createElement("div");
    tools.className = "tools";
    tools.append(button);
    table.closest(".table").append(tools);
  }

  /** A link to an arm's runs lights up all of them, not the first alone. */
  function light() {
    const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (const lit of all("tr.lit")) lit.classList.remove("lit");
    if (!row || !row.dataset.runs) return;
    for (const found of all(`tr[data-runs="${row.dataset.runs}"]`)) found.classList.add("lit");
  }
  addEventListener("hashchange", light);
  light();

  // ---------------------------------------------------------------- charts

  const data = JSON.parse(document.getElementById("payload").textContent);
  const state = { off: new Set(), x: "step", logX: false, logY: false, smooth: 0, seeds: data.seeds };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const PRINT_WIDTH = 680;  // within A4 and Letter
  let printing = false;

  const LIGHT = {
    ink: "#16191d", muted: "#59626c", grid: "#e9ebed", line: "#c4cad0", surface: "#fcfcfb",
    margin: "rgba(0,102,74,0.09)", edge: "#00664a", box: "#ffffff", band: 0.14,
  };
  const DARK = {
    ink: "#e8eaed", muted: "#a0a9b2", grid: "#262c32", line: "#48515a", surface: "#101316",
    margin: "rgba(95,211,171,0.12)", edge: "#5fd3ab", box: "#20252a", band: 0.22,
  };
  const isDark = () => dark.matches && !printing;
  const theme = () => (isDark() ? DARK : LIGHT);
  const colourOf = (arm) => (isDark() ? data.arms[arm].dark : data.arms[arm].colour);

  function wash(hex, alpha) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  /** plotly reads labels as a little HTML. */
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function xOf(series) {
    if (state.x === "tokens" && typeof series.tokens === "number") {
      return series.step.map((step) => step * series.tokens);
    }
    return series[state.x];
  }

  /** A line of a chart; `source` says what it is of, for hovering and clicking. */
  function line(arm, series, y, source, look) {
    const { width = 1, alpha = 1, dash = data.arms[arm].dash, hover = true, ...more } = look;
    return {
      type: "scatter",
      mode: "lines",
      x: xOf(series),
      y,
      visible: !state.off.has(arm),
      showlegend: false,
      opacity: alpha,
      line: { color: colourOf(arm), width, dash },
      customdata: series.step,
      meta: { arm, label: plain(data.arms[arm].label), ...source },
      hoverinfo: hover ? undefined : "skip",
      hovertemplate: hover
        ? "<b>%{meta.label}</b>, %{meta.what}<br>step %{customdata:,}: <b>%{y:.5g}</b><extra></extra>"
        : undefined,
      ...more,
    };
  }

  function area(arm, band) {
    const x = xOf(band);
    return {
      type: "scatter",
      mode: "lines",
      x: [...x, ...[...x].reverse()],
      y: [...band.high, ...[...band.low].reverse()],
      fill: "toself",
      fillcolor: wash(colourOf(arm), theme().band),
      line: { width: 0, color: colourOf(arm) },
      visible: !state.off.has(arm),
      showlegend: false,
      hoverinfo: "skip",
      meta: { arm },
    };
  }

  const seedOf = (run) => `seed ${run.seed}${run.status === "completed" ? "" : ` (${run.status})`}`;
  const sourceOf = (run) => ({ what: seedOf(run), link: run.link });

  /** A mean of one run is that run. */
  function meanOf(group, arm) {
    const runs = group.runs.filter((run) => run.arm === arm.arm && !run.loose);
    if (arm.numRuns === 1 && runs.length) return sourceOf(runs[0]);
    return { what: `mean of ${arm.numRuns} seeds`, rows: arm.rows };
  }

  /** Steps over which smoothing forgets; the slider runs from a step to a fifth of the run. */
  function memoryOf(last) {
    return state.smooth ? Math.max(1, last ** (state.smooth / 40) / 5) : 0;
  }

  /** An exponential mean over the steps themselves, so that thinning does not bend it. */
  function smoothed(step, values, memory) {
    let sum = 0, weight = 0, before = null;
    return values.map((value, i) => {
      if (value === null) return null;
      const keep = before === null ? 0 : Math.exp(-(step[i] - before) / memory);
      before = step[i];
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  const lastStep = Math.max(1, ...data.groups.flatMap((group) =>
    group.runs.map((run) => (run.train ? run.train.step.at(-1) : 1))));

  /** The mark at the end of a run that did not complete. */
  function end(run, kind) {
    const at = run.ends && run.ends[kind];
    if (!at) return [];
    const colour = colourOf(run.arm);
    const marker = run.diverged
      ? { symbol: "x", size: 12, color: colour, line: { color: theme().surface, width: 1 } }
      : { symbol: "circle-open", size: 9, color: colour, line: { color: colour, width: 2 } };
    return [line(run.arm, at, at.y, sourceOf(run), { mode: "markers", marker })];
  }

  function marked(arm, index, count, points) {
    const above = count - 1 - index;  // the wider the more is drawn on top of it
    return {
      mode: "lines+markers",
      width: Math.min(1.6 + 0.8 * above, 4),
      marker: {
        symbol: data.arms[arm].symbol,
        size: Math.min(6.5 + 1.3 * above, 11),
        color: colourOf(arm),
        line: { color: theme().surface, width: 1 },
        maxdisplayed: points > 40 ? 16 : 0,
      },
    };
  }

  function evaluations(group) {
    const traces = [];
    for (const run of group.runs.filter((found) => found.loose)) {
      if (run.train) traces.push(line(run.arm, run.train, run.train.y, sourceOf(run), { width: 0.9, alpha: 0.45, hover: false, dash: "solid" }));
      if (run.eval) traces.push(line(run.arm, run.eval, run.eval.y, sourceOf(run), { width: 1.3, dash: "4px,3px" }));
    }
    for (const arm of group.arms) if (arm.eval && arm.numRuns > 1) traces.push(area(arm.arm, arm.eval));
    if (state.seeds) {
      for (const run of group.runs.filter((found) => !found.loose && found.eval)) {
        traces.push(line(run.arm, run.eval, run.eval.y, sourceOf(run), { width: 0.8, alpha: 0.55 }));
      }
    }
    for (const [i, arm] of group.arms.entries()) {
      if (!arm.eval) continue;
      const look = marked(arm.arm, i, group.arms.length, arm.eval.step.length);
      traces.push(line(arm.arm, arm.eval, arm.eval.mean, meanOf(group, arm), look));
    }
    return [...traces, ...group.runs.flatMap((run) => end(run, "eval"))];
  }

  function differences(group) {
    const traces = [];
    for (const arm of group.arms) if (arm.gap && arm.gaps.length > 1) traces.push(area(arm.arm, arm.gap));
    for (const arm of group.arms) {
      if (!state.seeds) continue;
      for (const gap of arm.gaps) {
        traces.push(line(arm.arm, gap, gap.y, sourceOf(group.runs[gap.run]), { width: 0.8, alpha: 0.55 }));
      }
    }
    for (const [i, arm] of group.arms.entries()) {
      if (!arm.gap) continue;
      const source = arm.gaps.length === 1 ? sourceOf(group.runs[arm.gaps[0].run])
        : { what: `mean of ${arm.gaps.length} seeds`, rows: arm.rows };
      traces.push(line(arm.arm, arm.gap, arm.gap.mean, source, marked(arm.arm, i, group.arms.length, arm.gap.step.length)));
    }
    return traces;
  }

  function everyStep(group, kind) {
    const traces = [];
    const many = group.runs.length > 12;
    for (const run of group.runs) {
      if (!run[kind] || !(state.seeds || run.loose)) continue;
      const look = run.loose ? { width: 1.2, dash: "4px,3px" } : { width: 0.7, alpha: many ? 0.25 : 0.4 };
      traces.push(line(run.arm, run[kind], run[kind].y, sourceOf(run), look));
    }
    const memory = memoryOf(lastStep);
    for (const [i, arm] of group.arms.entries()) {
      const band = arm[kind];
      if (!band) continue;
      const source = meanOf(group, arm);
      const width = Math.min(1.2 + 0.5 * (group.arms.length - 1 - i), 3);
      if (!memory) {
        traces.push(line(arm.arm, band, band.mean, source, { width }));
        continue;
      }
      traces.push(line(arm.arm, band, band.mean, source, { width: 0.7, alpha: 0.3, hover: false }));
      const even = band.buckets || band;
      const what = `${source.what}, smoothed`;
      traces.push(line(arm.arm, even, smoothed(even.step, even.mean, memory), { ...source, what }, { width: width + 0.6 }));
    }
    return [...traces, ...group.runs.flatMap((run) => end(run, kind))];
  }

  function scales(group) {
    const traces = [];
    for (const run of group.runs) {
      if (!run.scale) continue;
      const look = { width: 1.4, alpha: 0.8, line: { color: colourOf(run.arm), width: 1.4, shape: "hv", dash: data.arms[run.arm].dash } };
      traces.push(line(run.arm, run.scale, run.scale.y, sourceOf(run), look));
      if (run.skipped) {
        const source = { ...sourceOf(run), what: `${seedOf(run)}, skipped` };
        traces.push(line(run.arm, run.skipped, run.skipped.y, source, {
          mode: "markers",
          marker: { symbol: "x-thin-open", size: 8, color: colourOf(run.arm), line: { width: 2, color: colourOf(run.arm) } },
        }));
      }
    }
    return traces;
  }

  const TRACES = {
    eval: evaluations,
    gap: differences,
    train: (group) => everyStep(group, "train"),
    grad: (group) => everyStep(group, "grad"),
    scale: scales,
  };
  const heightOf = (kind) => ({ eval: 320, memory: 110 + 48 * (data.memory || { bars: [] }).bars.length }[kind] || 240);
  const X_TITLES = { step: "step", tokens: "tokens served", seconds: "seconds of training" };

  function base(kind) {
    const look = theme();
    const axis = {
      gridcolor: look.grid, linecolor: look.line, zeroline: false, tickcolor: look.line,
      tickfont: { color: look.muted, size: 11 }, automargin: true,
      title: { font: { color: look.muted, size: 12 }, standoff: 8 },
    };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", color: look.ink, size: 12 },
      margin: { l: 48, r: 14, t: 12, b: 44 },
      hovermode: "closest",
      hoverlabel: { bgcolor: look.box, bordercolor: look.line, font: { color: look.ink, size: 12 }, align: "left" },
      dragmode: touch.matches ? false : "zoom",  // a finger scrolls the page
      showlegend: false,
      autosize: !printing,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: look.line, activecolor: look.ink },
    };
    if (printing) Object.assign(layout, { width: PRINT_WIDTH, height: heightOf(kind) });
    return { look, axis, layout };
  }

  function curves(chart) {
    const { kind, group } = chart;
    const { look, axis, layout } = base(kind);
    const found = data.groups[group];
    const limits = found.ranges[kind];
    const logY = kind === "scale" || (state.logY && kind !== "gap");
    const key = `${state.x} ${state.logX} ${state.logY} ${chart.resets}`;
    const x = { ...axis, type: state.logX ? "log" : "linear", title: { ...axis.title, text: X_TITLES[state.x] } };
    if (chart.zooms[group]) x.range = chart.zooms[group];
    else Object.assign(x, { autorange: true, rangemode: state.logX ? "normal" : "tozero" });
    x.uirevision = `${key} ${chart.zooms[group]}`;
    if (!state.logX) x.tickformat = state.x === "tokens" ? "~s" : ",";
    const y = { ...axis, type: logY ? "log" : "linear", uirevision: key };
    if (kind === "scale") Object.assign(y, { dtick: Math.log10(4), exponentformat: "none" });
    if (!limits || (logY && limits[0] <= 0)) y.autorange = true;
    else y.range = logY ? limits.map(Math.log10) : limits;
    layout.xaxis = x;
    layout.yaxis = y;
    if (kind === "gap") Object.assign(layout, yardsticks(found, look));
    return { traces: TRACES[kind](found), layout };
  }

  /** The margin as a band around zero, and how far the reference's own seeds lie apart. */
  function yardsticks(group, look) {
    const across = { type: "line", xref: "paper", x0: 0, x1: 1 };
    const shapes = [{ ...across, y0: 0, y1: 0, line: { color: look.muted, width: 1 } }];
    const annotations = [];
    if (group.margin !== null) {
      const m = group.margin;
      shapes.unshift({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: -m, y1: m, fillcolor: look.margin, line: { width: 0 }, layer: "below" });
      for (const y of [-m, m]) shapes.push({ ...across, y0: y, y1: y, line: { color: look.edge, width: 1, dash: "dot" } });
      annotations.push({ xref: "paper", x: 0.005, xanchor: "left", y: m, yanchor: "bottom", showarrow: false, text: group.marginText, font: { size: 11, color: look.edge } });
    }
    if (group.noise !== null) {
      const x = 0.995;
      shapes.push({ type: "line", xref: "paper", x0: x, x1: x, y0: -group.noise, y1: group.noise, line: { color: look.muted, width: 1.5 } });
      for (const y of [-group.noise, group.noise]) {
        shapes.push({ type: "line", xref: "paper", x0: x - 0.006, x1: 1, y0: y, y1: y, line: { color: look.muted, width: 1.5 } });
      }
    }
    return { shapes, annotations };
  }

  function memory() {
    const { look, axis, layout } = base("memory");
    const shown = data.memory.bars.map((bar, i) => ({ ...bar, i })).filter((bar) => !state.off.has(bar.arm));
    const places = shown.map((_, i) => i);
    const totals = shown.map(({ i }) => data.memory.categories.reduce((sum, found) => sum + found.mib[i], 0));
    const traces = data.memory.categories.map((category) => ({
      type: "bar",
      orientation: "h",
      name: category.words,
      y: places,
      x: shown.map(({ i }) => category.mib[i]),
      width: 0.42,
      marker: { color: category.colour },
      customdata: shown.map((bar, at) => [plain(bar.name), totals[at] ? (100 * category.mib[bar.i]) / totals[at] : 0]),
      hovertemplate: `<b>%{customdata[0]}</b><br>${category.words}: <b>%{x:,.1f} MiB</b> (%{customdata[1]:.0f} %)<extra></extra>`,
    }));
    // Names stand above their bars: beside them they would take half a phone.
    const annotations = shown.flatMap((bar, place) => [
      { x: 0, xref: "paper", xanchor: "left", y: place - 0.25, yanchor: "bottom", showarrow: false, text: plain(bar.name), font: { size: 12, color: look.ink } },
      { x: totals[place], xanchor: "left", y: place, showarrow: false, text: ` ${totals[place].toLocaleString("en", { maximumFractionDigits: 0 })}`, font: { size: 12, color: look.muted } },
    ]);
    Object.assign(layout, {
      barmode: "stack",
      annotations,
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: { size: 12, color: look.ink } },
      margin: { l: 8, r: 14, t: 8, b: 44 },
      xaxis: { ...axis, title: { ...axis.title, text: "MiB allocated at the peak of a training step" }, tickformat: ",", range: [0, 1.12 * Math.max(...totals, 1e-9)] },
      yaxis: { ...axis, showticklabels: false, showgrid: false, range: [shown.length - 0.5, -0.75], fixedrange: true },
    });
    return { traces, layout };
  }

  const CONFIG = {
    displaylogo: false,
    showSendToCloud: false,
    responsive: true,
    displayModeBar: touch.matches ? false : "hover",
    doubleClick: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
    toImageButtonOptions: { scale: 2 },
  };

  /** Its source lies in the page as text: to compile it would delay the first paint. */
  function startPlotly() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
    if (!window.Plotly) throw new Error("plotly.js did not start");
  }

  /** Back to the static pictures. */
  function giveUp(error) {
    root.classList.remove("live");
    console.warn("No interactive charts:", error);
  }

  const zooms = data.groups.map(() => null);  // of each group's x axis, shared by its charts
  const charts = all(".chart").map((element) => ({
    element,
    kind: element.dataset.kind,
    group: Number(element.dataset.group),
    zooms,
    resets: 0,
    near: false,
    drawn: false,
    stale: true,
  }));

  function draw(chart) {
    try {
      startPlotly();
      const { traces, layout } = chart.kind === "memory" ? memory() : curves(chart);
      Plotly.react(chart.element, traces, layout, CONFIG).catch(giveUp);
      if (!chart.drawn) listen(chart);
      chart.drawn = true;
      chart.stale = false;
    } catch (error) {
      giveUp(error);
    }
  }

  /** Charts out of sight wait until they are near. */
  function redraw(which = charts) {
    for (const chart of which) {
      chart.stale = true;
      if (chart.near || printing) draw(chart);
    }
  }

  function listen(chart) {
    chart.element.on("plotly_click", ({ points }) => {
      const { link, rows } = points[0].data.meta || {};
      if (link) window.open(link, "_blank");
      else if (rows !== undefined) location.hash = `runs-of-${rows}`;
    });
    if (chart.kind === "memory") return;
    const siblings = charts.filter((other) => other.group === chart.group && other.kind !== "memory");
    chart.element.on("plotly_relayout", (change) => {
      const zoomed = change["xaxis.range[0]"] !== undefined;
      if (!zoomed && !change["xaxis.autorange"]) return;
      zooms[chart.group] = zoomed ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null;
      redraw(siblings.filter((other) => other !== chart));
    });
    chart.element.on("plotly_doubleclick", () => {
      zooms[chart.group] = null;
      chart.resets += 1;
      redraw(siblings);
    });
  }

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((found) => found.element === entry.target);
      chart.near = entry.isIntersecting;
      if (chart.near && chart.stale) draw(chart);
    }
  }, { rootMargin: "400px 0px" });

  for (const chart of charts) {
    if (chart.kind === "memory") chart.element.style.height = `${heightOf("memory")}px`;
    observer.observe(chart.element);
  }

  // ---------------------------------------------------------------- controls

  for (const chip of all(".chip")) {
    chip.addEventListener("click", () => {
      const arm = Number(chip.dataset.arm);
      const hidden = !state.off.delete(arm);
      if (hidden) state.off.add(arm);
      chip.setAttribute("aria-pressed", String(!hidden));
      redraw();
    });
  }

  function unzoom() {
    zooms.fill(null);
    redraw();
  }
  for (const input of all('input[name="x"]')) {
    input.checked = input.value === state.x;
    input.addEventListener("change", () => { state.x = input.value; unzoom(); });
  }
  for (const [id, key] of [["log-x", "logX"], ["log-y", "logY"], ["seeds", "seeds"]]) {
    const input = document.getElementById(id);
    if (!input) continue;
    input.checked = state[key];
    input.addEventListener("change", () => {
      state[key] = input.checked;
      if (key === "logX") unzoom();
      else redraw();
    });
  }
  const slider = document.getElementById("smoothing");
  if (slider) {
    slider.value = 0;  // a reloaded page would keep the old place
    slider.addEventListener("input", () => {
      state.smooth = Number(slider.value);
      const steps = Math.round(memoryOf(lastStep));
      slider.nextElementSibling.textContent = state.smooth ? `${steps.toLocaleString("en")} step${steps === 1 ? "" : "s"}` : "off";
      redraw(charts.filter((chart) => chart.kind === "train" || chart.kind === "grad"));
    });
  }

  dark.addEventListener("change", () => redraw());
  addEventListener("beforeprint", () => { printing = true; redraw(); });
  addEventListener("afterprint", () => { printing = false; redraw(); });
})();
