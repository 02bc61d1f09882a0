// Keys, theme and address. Pages say what a key does by `data-key`, `data-go` and `data-search` on their elements.
"use strict";
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

  const charts = () =>
    [...document.querySelectorAll(".view-chart")].map((one) => getElement(one.id.slice(1))?.chart).filter(Boolean);
  const zoomOf = (chart) => chart.getOption()?.dataZoom?.[0];
  let zooming = false;

  function zoomable(id) {
    const { chart, $el: place } = getElement(id);
    if (!zoomOf(chart) || "zoomable" in place.dataset) return;
    place.dataset.zoomable = "";
    chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    place.addEventListener("dblclick", () => chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
  }

  // One chart was zoomed: the others follow.
  function zoomed(id) {
    if (zooming) return;
    zooming = true;
    const source = getElement(id).chart;
    const { start, end, startValue, endValue } = zoomOf(source);
    const all = start <= 0 && end >= 100;
    for (const other of charts()) {
      if (other === source || !zoomOf(other)) continue;
      other.dispatchAction(all ? { type: "dataZoom", start, end } : { type: "dataZoom", startValue, endValue });
    }
    const short = (value) => Number(value.toPrecision(6));
    address(all ? { from: null, to: null } : { from: short(startValue), to: short(endValue) });
    zooming = false;
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

  return { address, choose, zoomable, zoomed, escape, number, band };
})();
