"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--text"), grid: of("--grid"), line: of("--line"), page: of("--page") };
  }

  const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

  // texts, grids and sizes are the page's; the chart itself says what is drawn
  function layoutOf(chart, width) {
    const now = colours();
    const size = Math.round(rem() * (width < 500 ? 0.7 : 0.78));
    const scale = rem() / 16;
    const layout = {
      ...chart.layout, showlegend: false, height: Math.round(chart.height * scale), autosize: true, bargap: 0.1,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      dragmode: coarse ? false : "zoom", font: { color: now.text, size, family: "system-ui, sans-serif" },
      margin: { l: 8, r: 12, t: 8, b: 8 }, hoverlabel: { bgcolor: now.page, font: { color: now.text, size } },
    };
    for (const name of Object.keys(chart.layout)) {
      if (/^[xy]axis/.test(name)) {
        layout[name] = {
          automargin: true, gridcolor: now.grid, linecolor: now.line, zerolinecolor: now.line, tickcolor: now.line,
          ...(width < 500 && !chart.layout[name].tickvals ? { nticks: 4 } : {}), ...chart.layout[name],
        };
      }
    }
    return layout;
  }

  // a text for each cell of a layout, made here: the page would be large of them
  function cellTexts(chart) {
    const { gpus, profiles, slices } = chart.cells;
    const trace = chart.data[0];
    return trace.z.map((row, number) => {
      const slice = number % (slices + 1);
      const where = `${gpus[Math.floor(number / (slices + 1))]}, memory slice ${slice}`;
      return row.map((profile, bin) => {
        const share = trace.customdata[number][bin];
        if (slice === slices) return "";
        return profile === null ? `${where}: held ${share} % of the time` : `${where}: ${profiles[profile]}, held ${share} % of the time`;
      });
    });
  }

  function draw(chart) {
    const place = document.getElementById(`chart-${chart.id}`);
    if (chart.cells) chart.data[0].text = cellTexts(chart);
    return Plotly.newPlot(place, chart.data, layoutOf(chart, place.clientWidth), config);
  }

  function restyle() {
    for (const chart of charts) {
      const place = document.getElementById(`chart-${chart.id}`);
      const ranges = {};
      for (const name of Object.keys(chart.layout)) {
        if (/^[xy]axis/.test(name) && place.layout[name]) ranges[name] = { ...place.layout[name] };
      }
      const layout = layoutOf(chart, place.clientWidth);
      for (const name of Object.keys(ranges)) layout[name] = { ...layout[name], range: ranges[name].range };
      Plotly.react(place, place.data, layout, config);
    }
  }

  // what a pointer does by dragging, keys do too: arrows move, + and - zoom, 0 shows all
  function keys(chart, event) {
    const place = event.currentTarget;
    const axis = place.layout.xaxis;
    if (event.target !== place || event.ctrlKey || event.altKey || event.metaKey) return;
    const dated = axis.type === "date";
    const [low, high] = axis.range.map((end) => (dated ? new Date(String(end).replace(" ", "T")).getTime() : Number(end)));
    const length = high - low;
    const moves = {
      ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-1 / 3, 1 / 3],
    };
    if (event.key === "0") {
      Plotly.relayout(place, chart.layout.xaxis.range ? { "xaxis.range": [...chart.layout.xaxis.range] } : { "xaxis.autorange": true });
    } else if (moves[event.key]) {
      const [first, last] = moves[event.key];
      const ends = [low + first * length, high + last * length];
      const local = (at) => new Date(at - new Date(at).getTimezoneOffset() * 60000).toISOString().slice(0, 19);
      Plotly.relayout(place, { "xaxis.range": dated ? ends.map(local) : ends });
    } else {
      return;
    }
    event.preventDefault();
  }

  function toggle(button) {
    const place = document.getElementById(`chart-${button.dataset.chart}`);
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    Plotly.restyle(place, { visible: shown }, [Number(button.dataset.trace)]);
  }

  async function start() {
    for (const chart of charts) {
      await draw(chart);
      document.getElementById(`chart-${chart.id}`).addEventListener("keydown", (event) => keys(chart, event));
    }
    for (const button of document.querySelectorAll(".legend button")) {
      button.disabled = false;
      button.addEventListener("click", () => toggle(button));
    }
    dark.addEventListener("change", restyle);
    document.body.dataset.drawn = String(Math.round(performance.now()));
  }

  start();
})();
