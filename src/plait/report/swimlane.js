// Swimlanes of many spans. Far out all lanes are one picture, in which every column mixes the colours of what fills it;
// near enough that few spans are in view, each is a bar with its name.
const COLUMNS = 1400;
const WIDTH = 1300;  // pixels, about, into which names must fit
const LANE = 5;  // rows of the picture for each lane; the last one is white
const MOST_BARS = 3000;

const rgb = colour => [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));

function unpack(text, type) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new type(bytes.buffer);
}

function lanes(place, packed, config) {
  const rows = packed.rows.map(row => ({
    ...row,
    start: unpack(row.start, Float32Array), end: unpack(row.end, Float32Array), rank: unpack(row.rank, Uint16Array),
    kind: unpack(row.kind, Uint8Array), name: unpack(row.name, Uint32Array),
  }));
  const legend = packed.kinds.map(kind => ({
    type: "scatter", mode: "markers", x: [null], y: [null], name: kind.name,
    marker: {symbol: "square", size: 11, color: kind.colour},
  }));

  function bars(row, inView, axis, from, to) {
    const room = (to - from) / WIDTH, fits = inView.filter(i => packed.kinds[row.kind[i]].computes &&
      row.end[i] - row.start[i] > room * (6 + 6 * packed.names[row.name[i]].length));
    const names = {
      type: "scatter", mode: "text", showlegend: false, hoverinfo: "skip", xaxis: "x" + axis, yaxis: "y" + axis,
      x: fits.map(i => (row.start[i] + row.end[i]) / 2), y: fits.map(i => row.rank[i]),
      text: fits.map(i => packed.names[row.name[i]]), textfont: {color: "white", size: 9},
    };
    return packed.kinds.map((kind, code) => {
      const mine = inView.filter(i => row.kind[i] === code);
      const names = mine.map(i => packed.names[row.name[i]]);
      return {
        type: "bar", orientation: "h", showlegend: false, xaxis: "x" + axis, yaxis: "y" + axis, width: kind.height,
        base: mine.map(i => row.start[i]), x: mine.map(i => row.end[i] - row.start[i]),
        y: mine.map(i => row.rank[i] + kind.offset),
        marker: {color: kind.colour, line: {width: kind.computes ? 0.5 : 0, color: "white"}},
        hoverinfo: "text",
        hovertext: mine.map((i, n) => `rank ${row.rank[i]}: ${names[n]} (${kind.name})<br>` +
          `${row.start[i].toPrecision(6)} to ${row.end[i].toPrecision(6)} s`),
      };
    }).filter(trace => trace.x.length).concat(names);
  }

  function picture(row, inView, axis, from, to) {
    const step = (to - from) / COLUMNS, colours = packed.kinds.map(kind => rgb(kind.colour));
    const mixed = new Float32Array(row.ranks * COLUMNS * 4);  // red, green, blue and how much of the column is filled
    for (const i of inView) {
      const code = row.kind[i];
      if (packed.kinds[code].beside) continue;  // it goes on beside what the rank does
      const [red, green, blue] = colours[code];
      const start = Math.max((row.start[i] - from) / step, 0), end = Math.min((row.end[i] - from) / step, COLUMNS);
      for (let column = Math.floor(start); column < end; column++) {
        const part = Math.min(end, column + 1) - Math.max(start, column);
        const at = (row.rank[i] * COLUMNS + column) * 4;
        mixed[at] += part * red; mixed[at + 1] += part * green; mixed[at + 2] += part * blue; mixed[at + 3] += part;
      }
    }
    const canvas = document.createElement("canvas");
    canvas.width = COLUMNS;
    canvas.height = row.ranks * LANE;
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    for (let y = 0; y < canvas.height; y++) {
      if (y % LANE === LANE - 1) continue;  // between lanes
      for (let column = 0; column < COLUMNS; column++) {
        const at = (Math.floor(y / LANE) * COLUMNS + column) * 4, to = (y * COLUMNS + column) * 4;
        const filled = mixed[at + 3];
        if (!filled) continue;
        for (let n = 0; n < 3; n++) image.data[to + n] = mixed[at + n] / filled;
        image.data[to + 3] = 255 * Math.min(filled, 1);
      }
    }
    context.putImageData(image, 0, 0);
    return {
      source: canvas.toDataURL(), xref: "x" + axis, yref: "y" + axis, x: from, y: -0.5, sizex: to - from,
      sizey: row.ranks, sizing: "stretch", layer: "above",
    };
  }

  const gd = document.getElementById(place);
  const options = {...config, doubleClick: "reset"};
  const last = Math.max(...rows.map(row => row.seconds));
  const first = {...packed.layout};
  for (const name of Object.keys(first)) if (name.startsWith("xaxis")) first[name] = {...first[name], range: [0, last]};

  function draw(from, to, layout) {
    const data = [...legend], images = [];
    rows.forEach((row, index) => {
      const inView = [], axis = index ? String(index + 1) : "";
      for (let i = 0; i < row.start.length; i++) if (row.end[i] >= from && row.start[i] <= to) inView.push(i);
      if (inView.length > MOST_BARS) images.push(picture(row, inView, axis, from, to));
      else data.push(...bars(row, inView, axis, from, to));
    });
    return Plotly.react(gd, data, {...layout, images}, options);
  }

  const drawn = draw(0, last, first);
  gd.removeAllListeners("plotly_relayout");
  gd.on("plotly_relayout", change => {
    if (Object.keys(change).some(key => key.startsWith("xaxis"))) draw(...gd._fullLayout.xaxis.range, gd.layout);
  });
  return drawn;
}
