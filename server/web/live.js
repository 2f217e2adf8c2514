// The live view: figures and charts drawn from /metrics while it is open.

import { compiling, mean, metrics, sum } from './api.js';
import { $, element } from './dom.js';

const INTERVAL_SECONDS = 2;
const CHART_SECONDS = 120;
const WINDOW_SECONDS = 60;
const TIMES = ['2 min ago', '1 min ago', 'now'];
const charts = new Map();
let before = null;
let readings = []; // those of the last minute
let timer = 0;

/** `notify(text, {percent})` shows a line above the view. */
export function startLive(notify) {
  return {
    open() {
      if (!timer) tick(notify);
    },
    close() {
      clearTimeout(timer);
      timer = 0;
      before = null;
      readings = [];
      for (const { points } of charts.values()) points.length = 0;
      notify('');
    },
  };
}

async function tick(notify) {
  timer = setTimeout(() => tick(notify), INTERVAL_SECONDS * 1000);
  try {
    const now = { time: performance.now() / 1000, samples: await metrics() };
    if (!timer) return; // closed meanwhile
    readings = [...readings.filter(({ time }) => now.time - time <= WINDOW_SECONDS), now];
    draw(now);
    before = now;
    const program = compiling(now.samples);
    if (sum(now.samples, 'replica_state', 'state', 'stalled')) notify('The engine seems to hang; /health says for how long.');
    else if (program) notify(`${program.text}; requests wait for it.`, program);
    else notify('');
  } catch (error) {
    if (timer) notify(`Cannot read the metrics: ${error.message}`);
  }
}

function draw(now) {
  const total = (name) => sum(now.samples, name);
  const rate = (name) => (before ? Math.max(0, total(name) - sum(before.samples, name)) / (now.time - before.time) : null);
  const percent = (part) => `${(100 * part).toFixed(1)} %`;
  const queries = total('prefix_cache_queries_total');
  const cache = mean(now.samples, 'kv_cache_usage_perc'); // of the replicas
  const output = rate('generation_tokens_total');
  const prompt = rate('prompt_tokens_total');
  const gap = quantile(now, 'inter_token_latency_seconds', 0.5);
  figures('figures', {
    'Running requests': short(total('num_requests_running')),
    'Waiting requests': short(total('num_requests_waiting')),
    'Output tokens/s': short(output),
    'First token, median': duration(quantile(now, 'time_to_first_token_seconds', 0.5)),
    'Between tokens, median': duration(gap),
    'KV cache in use': percent(cache),
  });
  figures('more-figures', {
    'Prompt tokens/s': short(prompt),
    'First token, p99': duration(quantile(now, 'time_to_first_token_seconds', 0.99)),
    'Prefix cache hits': queries ? percent(total('prefix_cache_hits_total') / queries) : '–',
    'Output tokens': short(total('generation_tokens_total')),
    'Finished requests': short(total('request_success_total')),
    Preemptions: short(total('num_preemptions_total')),
  });
  const hasHostMemory = now.samples.some(({ name }) => name === 'num_requests_loading');
  $('host-memory').hidden = !hasHostMemory;
  if (hasHostMemory) {
    const gigabytes = (name) => (before ? (rate(name) / 1e9).toFixed(1) : '–');
    const asked = total('external_prefix_cache_queries_total');
    figures('host-memory', {
      'Host memory in use': percent(mean(now.samples, 'kv_offload_cpu_cache_usage_perc')),
      'Host memory hits': asked ? percent(total('external_prefix_cache_hits_total') / asked) : '–',
      'Requests loading': short(total('num_requests_loading')),
      'Loads, GB/s': gigabytes('kv_offload_load_bytes_total'),
      'Stores, GB/s': gigabytes('kv_offload_store_bytes_total'),
      'Blocks not copied': short(total('kv_offload_stores_skipped_total')),
    });
  }
  chart(now, 'Output tokens/s', output);
  chart(now, 'Running requests', total('num_requests_running'));
  chart(now, 'Waiting requests', total('num_requests_waiting'));
  chart(now, 'Between tokens, median, ms', gap && 1000 * gap);
  chart(now, 'KV cache in use, %', 100 * cache, 100);
  chart(now, 'Prompt tokens/s', prompt);
}

/** A quantile of the observations of the last minute, else of all, from the histogram's buckets; null without any. */
function quantile(now, name, wanted) {
  const first = readings[0];
  const count = (reading) => sum(reading.samples, `${name}_count`);
  const base = first !== now && count(now) > count(first) ? first : null;
  const buckets = new Map();
  const add = (samples, sign) => {
    for (const { name: found, labels, value } of samples)
      if (found === `${name}_bucket`) {
        const bound = labels.le === '+Inf' ? Infinity : Number(labels.le);
        buckets.set(bound, (buckets.get(bound) || 0) + sign * value);
      }
  };
  add(now.samples, 1);
  if (base) add(base.samples, -1);
  const sorted = [...buckets].sort(([a], [b]) => a - b);
  const total = sorted.at(-1)?.[1] || 0;
  if (!total) return null;
  let low = 0;
  let below = 0;
  for (const [bound, count] of sorted) {
    if (count >= wanted * total) return bound === Infinity ? low : low + ((bound - low) * (wanted * total - below)) / (count - below || 1);
    low = bound;
    below = count;
  }
  return low;
}

const duration = (seconds) => (seconds === null ? '–' : seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`);

const short = (value) => (value === null ? '–' : value.toLocaleString('en', { maximumFractionDigits: value < 10 ? 1 : 0 }));

const shape = (name, attributes = {}) => {
  const node = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};

function figures(id, values) {
  const groups = Object.entries(values).map(([title, value]) =>
    element('div', {}, element('dt', { textContent: title }), element('dd', { textContent: value })),
  );
  $(id).replaceChildren(...groups);
}

/** The smallest round number that is not below the value. */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 4, 6, 8, 10].find((factor) => factor * unit >= value);
}

/** Adds a value, if there is one, to the chart of this title and draws it. The value axis ends at `top`, else above the highest value. */
function chart(now, title, value, top) {
  if (!charts.has(title)) charts.set(title, newChart(title));
  const { points, area, line, latest, picture, marks } = charts.get(title);
  if (value !== null) points.push({ time: now.time, value });
  while (points.length && now.time - points[0].time > CHART_SECONDS) points.shift();
  const peak = Math.max(0, ...points.map((point) => point.value));
  const highest = top ?? roundUp(Math.max(2, peak));
  const place = (point) => `${(CHART_SECONDS - now.time + point.time).toFixed(2)},${(100 - (100 * point.value) / highest).toFixed(2)}`;
  const path = points.map(place).join(' ');
  const [from, to] = [points.at(0), points.at(-1)].map((point) => CHART_SECONDS - now.time + (point?.time ?? now.time));
  line.setAttribute('points', path);
  area.setAttribute('points', `${from},100 ${path} ${to},100`);
  [highest, highest / 2, 0].forEach((mark, n) => (marks[n].textContent = mark.toLocaleString('en', { notation: 'compact' })));
  latest.textContent = points.length ? `${short(value)} · peak ${short(peak)}` : '–';
  picture.setAttribute('aria-label', points.length ? `${title}: now ${short(value)}, peak ${short(peak)} in the last two minutes` : `${title}: no data yet`);
}

function newChart(title) {
  const picture = shape('svg', { viewBox: `0 0 ${CHART_SECONDS} 100`, preserveAspectRatio: 'none', role: 'img' });
  const grid = [0, 50, 100].map((y) => shape('line', { x1: 0, x2: CHART_SECONDS, y1: y, y2: y }));
  grid.push(shape('line', { x1: CHART_SECONDS / 2, x2: CHART_SECONDS / 2, y1: 0, y2: 100 }));
  const [area, line] = [shape('polygon'), shape('polyline')];
  picture.append(...grid, area, line);
  const marks = [0, 1, 2].map(() => element('span', {}));
  const times = TIMES.map((time) => element('span', { textContent: time }));
  const latest = element('strong', {});
  const values = element('div', { className: 'values', ariaHidden: 'true' }, ...marks);
  const plot = element('div', { className: 'plot' }, values, picture, element('div', { className: 'times', ariaHidden: 'true' }, ...times));
  $('charts').append(element('figure', {}, element('figcaption', {}, element('span', { textContent: title }), latest), plot));
  return { points: [], area, line, latest, picture, marks };
}
