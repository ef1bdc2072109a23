// Draws the charts of the page with uPlot. Each has its data in a script element of JSON, as `Chart` in page.py.
(() => {
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (number) => style(`--c${number % 8}`);
  const short = (value) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(3) + "G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
    return String(+value.toPrecision(size >= 1000 ? 4 : 3));
  };

  // One ascending x for all series, as uPlot wants it. Points with notes keep a place of their own.
  function joined(series, isLog) {
    const places = [];
    series.forEach((one, number) => one.x.forEach((x, index) => {
      const y = isLog && !(one.y[index] > 0) ? null : one.y[index];
      places.push({ x, y, number, index });
    }));
    places.sort((a, b) => a.x - b.x);
    const xs = [], ys = series.map(() => []), at = series.map(() => []);
    for (const { x, y, number, index } of places) {
      const last = xs.length - 1;
      if (!(last >= 0 && xs[last] === x && ys[number][last] === null)) {
        xs.push(x);
        ys.forEach((values) => values.push(null));
        at.forEach((indexes) => indexes.push(null));
      }
      ys[number][xs.length - 1] = y;
      at[number][xs.length - 1] = index;
    }
    return { data: [xs, ...ys], at };
  }

  function lines(plot, spec) {
    const { ctx, bbox } = plot, dots = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = ctx.fillStyle = style("--ink");
    ctx.textAlign = "left";
    ctx.font = `${11 * dots}px system-ui, sans-serif`;
    ctx.setLineDash([5 * dots, 4 * dots]);
    for (const [scale, all] of [["y", spec.levels], ["x", spec.marks]]) {
      for (const [value, name] of all) {
        const place = plot.valToPos(value, scale, true);
        ctx.beginPath();
        if (scale === "y") {
          ctx.moveTo(bbox.left, place);
          ctx.lineTo(bbox.left + bbox.width, place);
          ctx.fillText(name, bbox.left + 4 * dots, place - 4 * dots);
        } else {
          ctx.moveTo(place, bbox.top);
          ctx.lineTo(place, bbox.top + bbox.height);
          ctx.fillText(name, place + 4 * dots, bbox.top + 12 * dots);
        }
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  // Points, filled or not, which uPlot has not for series of their own.
  function shapes(plot, spec, at) {
    const { ctx, bbox } = plot, dots = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 4 * dots, bbox.top - 4 * dots, bbox.width + 8 * dots, bbox.height + 8 * dots);
    ctx.clip();
    spec.series.forEach((one, number) => {
      if (!plot.series[number + 1].show) return;
      ctx.strokeStyle = ctx.fillStyle = colour(one.colour);
      ctx.lineWidth = 1.5 * dots;
      one.x.forEach((x, index) => {
        if (one.y[index] === null || (spec.is_log && one.y[index] <= 0)) return;
        const left = plot.valToPos(x, "x", true), top = plot.valToPos(one.y[index], "y", true);
        if (one.shape === "points" || one.filled.length) {
          ctx.beginPath();
          ctx.arc(left, top, 2.6 * dots, 0, 7);
          one.filled.length && !one.filled[index] ? ctx.stroke() : ctx.fill();
        }
      });
    });
    ctx.restore();
  }

  function draw(box) {
    const spec = JSON.parse(box.querySelector("script").textContent);
    const { data, at } = joined(spec.series, spec.is_log);
    const ink = style("--ink"), soft = style("--soft"), line = style("--line");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 18 };
    const y = { distr: spec.is_log ? 3 : 1 };
    if (spec.y_range) y.range = spec.y_range;
    box.querySelector(".uplot")?.remove();
    new uPlot({
      width: box.clientWidth,
      height: spec.height * (document.documentElement.classList.contains("paper") ? 0.75 : 1),
      scales: { x: { time: false }, y },
      axes: [
        { ...axis, label: spec.x_label, size: 34, values: (_, all) => all.map(short) },
        { ...axis, label: spec.y_label, size: 50, values: (_, all) => all.map((value) => value === null ? "" : short(value)) },
      ],
      series: [
        { label: spec.x_label, value: (_, value) => short(value) },
        ...spec.series.map((one, number) => ({
          label: one.name,
          stroke: colour(one.colour),
          width: one.shape === "points" ? 0 : 1.8,
          dash: one.shape === "dashed" ? [6, 4] : undefined,
          paths: one.shape === "points" ? () => null : undefined,
          points: { show: false },
          spanGaps: true,
          value: (_, value, __, index) => {
            if (value === null || value === undefined) return "-";
            const note = one.notes[at[number][index]];
            return note ? note : short(value);
          },
        })),
      ],
      cursor: { points: { size: 7 } },
      legend: { live: true },
      hooks: { draw: [(plot) => { shapes(plot, spec, at); lines(plot, spec); }] },
    }, data, box);
    box.style.color = ink;
  }

  const all = () => document.querySelectorAll(".chart").forEach(draw);
  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(all, 100); };
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; soon(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  // On paper the page is light, whatever the screen. The style makes the charts as wide as the paper's columns.
  addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); all(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); all(); });
  all();
})();
