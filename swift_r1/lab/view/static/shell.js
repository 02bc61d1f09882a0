// Keys, theme and address. Pages say what a key does by `data-key`, `data-go` and `data-search` on their elements.
"use strict";
document.documentElement.lang = "en";
const view = (() => {
  const themes = ["auto", "light", "dark"];
  let awaitsPage = false;

  const stored = () => themes[Math.max(0, themes.indexOf(localStorage.getItem("swift-view-theme")))];

  function applyTheme() {
    const theme = stored();
    Quasar.Dark.set(theme === "auto" ? "auto" : theme === "dark");
    const button = document.querySelector(".view-theme");
    if (button) button.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
  }

  function nextTheme() {
    localStorage.setItem("swift-view-theme", themes[(themes.indexOf(stored()) + 1) % themes.length]);
    applyTheme();
  }

  const shown = (element) => element.getClientRects().length > 0 && !element.disabled;
  const named = (element) => element.title || element.getAttribute("aria-label") || element.textContent;

  function help() {
    document.querySelector("dialog.view-help")?.remove();
    const lines = [];
    for (const link of document.querySelectorAll("[data-go]")) lines.push([`g ${link.dataset.go}`, link.textContent]);
    for (const one of document.querySelectorAll("[data-key]")) if (shown(one)) lines.push([one.dataset.key, named(one)]);
    if (document.querySelector("[data-search]")) lines.push(["/", "search"]);
    const dialog = document.createElement("dialog");
    dialog.className = "view-help";
    for (const [keys, text] of lines) {
      const line = dialog.appendChild(document.createElement("div"));
      for (const key of keys.split(" ")) line.appendChild(document.createElement("kbd")).textContent = key;
      line.append(` ${text}`);
    }
    dialog.addEventListener("click", () => dialog.close());
    document.body.append(dialog);
    dialog.showModal();
  }

  function press(event) {
    const inText = event.target.closest?.("input, textarea, select, [contenteditable=true], dialog, .q-menu");
    if (inText || event.ctrlKey || event.metaKey || event.altKey) {
      if (inText && event.key === "Escape") event.target.blur();
      return;
    }
    const find = (name, key) =>
      [...document.querySelectorAll(`[data-${name}]`)].find(
        (one) => one.dataset[name].split(" ").includes(key) && shown(one),
      );
    let target;
    if (awaitsPage) {
      awaitsPage = false;
      target = find("go", event.key);
    } else if (event.key === "g") {
      awaitsPage = true;
      setTimeout(() => (awaitsPage = false), 1500);
      return;
    } else if (event.key === "/") {
      const search = document.querySelector("[data-search]");
      (search?.matches("input") ? search : search?.querySelector("input"))?.focus();
      if (search) event.preventDefault();
      return;
    } else {
      target = find("key", event.key);
    }
    if (target) {
      event.preventDefault();
      target.click();
    }
  }

  document.addEventListener("keydown", press);
  document.addEventListener("click", (event) => {
    if (event.target.closest?.(".view-theme")) nextTheme();
    if (event.target.closest?.(".view-keys")) help();
  });
  const started = setInterval(() => {
    if (!document.querySelector(".view-header, .view-main") || !window.Quasar) return;
    clearInterval(started);
    applyTheme();
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    document.querySelector(".q-loading-bar")?.setAttribute("aria-label", "loading");
  }, 20);

  // Changes parameters of the address; null leaves one out.
  function address(changes) {
    const url = new URL(location);
    for (const [name, value] of Object.entries(changes)) {
      if (value === null) url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    history.replaceState(history.state, "", url);
  }

  // The same page of other runs.
  function choose(runs) {
    const url = new URL(location);
    url.searchParams.delete("run");
    for (const run of runs) url.searchParams.append("run", run);
    location.assign(url);
  }

  const all = () =>
    [...document.querySelectorAll(".view-chart")].map((one) => getElement(one.id.slice(1))?.chart).filter(Boolean);
  const zoomOf = (chart) => chart.getOption()?.dataZoom?.[0];
  const linesOf = (chart) => chart.getOption().series.filter((one) => one.type === "line" && one.tooltip?.show);
  let zooming = false;

  // What a chart can do, once it is drawn.
  function chart(id) {
    const { chart, $el: place } = getElement(id);
    if (!zoomOf(chart) || "ready" in place.dataset) return;
    place.dataset.ready = "";
    chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    const asked = new URL(location).searchParams;
    if (asked.has("from") && asked.has("to")) {
      // the window that the other charts show, which the address knows and the server may not
      const window = { startValue: Number(asked.get("from")), endValue: Number(asked.get("to")) };
      quietly(() => chart.dispatchAction({ type: "dataZoom", ...window }));
    }
    let click = 0;
    place.addEventListener("dblclick", () => {
      clearTimeout(click);
      chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
    });
    const mouse = chart.getZr();
    mouse.on("click", ({ offsetX, offsetY, event }) => {
      const found = pointAt(chart, offsetX, offsetY);
      const elsewhere = event.ctrlKey || event.metaKey;
      clearTimeout(click); // it may be the second of two
      if (found) click = setTimeout(() => open(chart, ...found, elsewhere), elsewhere ? 0 : 300);
    });
    mouse.on("mousemove", ({ offsetX, offsetY }) => {
      const inside = chart.containPixel({ gridIndex: 0 }, [offsetX, offsetY]);
      point(chart, inside ? chart.convertFromPixel({ xAxisIndex: 0 }, offsetX) : null);
      mouse.setCursorStyle(inside && pointAt(chart, offsetX, offsetY) ? "pointer" : "crosshair");
    });
    mouse.on("globalout", () => point(chart, null));
    let at = -1;
    place.addEventListener("keydown", (event) => {
      const [line] = linesOf(chart);
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (line && by) {
        at = Math.max(0, Math.min(line.data.length - 1, at + by));
        point(null, line.data[at][0]);
      } else if (line && event.key === "Enter" && at >= 0) open(chart, line, line.data[at], false);
      else return;
      event.stopPropagation();
      event.preventDefault();
    });
    place.addEventListener("blur", () => point(null, null));
  }

  // Other charts are pointed at where one is.
  let asked = 0;
  function point(source, x) {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => {
      for (const other of all()) {
        const { top, bottom } = other.getDom().getBoundingClientRect();
        if (other === source || bottom < 0 || top > innerHeight || !linesOf(other).length) continue;
        const pixel = x === null ? null : other.convertToPixel({ xAxisIndex: 0 }, x);
        if (pixel !== null && other.containPixel({ gridIndex: 0 }, [pixel, other.getHeight() / 2]))
          other.dispatchAction({ type: "showTip", x: pixel, y: other.getHeight() / 2 });
        else other.dispatchAction({ type: "hideTip" });
      }
    });
  }

  // The line and the point of it that is nearest to a place, of those within reach that lead on.
  function pointAt(chart, x, y) {
    if (!chart.containPixel({ gridIndex: 0 }, [x, y])) return null;
    let found = null, least = 30;
    for (const line of linesOf(chart).filter((one) => one.opens)) {
      for (const value of line.data) {
        if (value[1] === null) continue;
        const [right, down] = chart.convertToPixel({ gridIndex: 0 }, value);
        const far = Math.hypot(right - x, down - y);
        if (far < least) [found, least] = [[line, value], far];
      }
    }
    return found;
  }

  function open(chart, line, value, elsewhere) {
    if (!line.opens) return;
    const url = new URL(line.opens, location);
    url.searchParams.set("step", value[0] - ((value[0] - 1) % line.every));
    if (elsewhere) window.open(url, "_blank");
    else location.assign(url);
  }

  // What is said where a chart is pointed at.
  function tip(shown) {
    const points = shown.filter((one) => one.value[1] !== null && one.value[1] !== undefined);
    if (!points.length) return "";
    const lines = points.map(({ marker, seriesName, value: [, y, low, high] }) => {
      const interval = typeof low === "number" ? ` [${number(low)}, ${number(high)}]` : "";
      return `${marker}${escape(seriesName)} <b>${number(y)}</b>${interval}`;
    });
    return [`step ${number(points[0].value[0])}`, ...lines].join("<br>");
  }

  function quietly(work) {
    zooming = true;
    work();
    zooming = false;
  }

  // One chart was zoomed: the others follow.
  function zoomed(id) {
    if (zooming) return;
    const source = getElement(id).chart;
    const { start, end, startValue, endValue } = zoomOf(source);
    const whole = start <= 0 && end >= 100;
    quietly(() => {
      for (const other of all()) {
        if (other === source || !zoomOf(other)) continue;
        other.dispatchAction(whole ? { type: "dataZoom", start, end } : { type: "dataZoom", startValue, endValue });
      }
    });
    const short = (value) => Number(value.toPrecision(6));
    address(whole ? { from: null, to: null } : { from: short(startValue), to: short(endValue) });
  }

  const escape = (text) => String(text).replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(4)));
  }

  // ECharts calls it for each [x, low, high] of a series; the first draws all of them as one polygon.
  function band(params, api) {
    if (params.dataIndexInside > 0) return null;
    const upper = [], lower = [];
    for (let index = 0; index < params.dataInsideLength; index++) {
      const x = api.value(0, index);
      upper.push(api.coord([x, api.value(2, index)]));
      lower.unshift(api.coord([x, api.value(1, index)]));
    }
    return { type: "polygon", shape: { points: [...upper, ...lower] }, style: api.style() };
  }

  return { address, choose, chart, zoomed, tip, escape, number, band };
})();
