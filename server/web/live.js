// The live view: figures and charts drawn from /metrics while it is open.

import { metrics } from './api.js';

const INTERVAL_SECONDS = 2;
const NUM_POINTS = 60;
const WINDOW_SECONDS = 60;
const $ = (id) => document.getElementById(id);
const series = new Map();
let before = null;
let readings = []; // those of the last minute
let timer = 0;

export function startLive(onFault) {
  return {
    open() {
      if (!timer) tick(onFault);
    },
    close() {
      clearTimeout(timer);
      timer = 0;
      before = null;
      readings = [];
      for (const { points } of series.values()) points.length = 0;
    },
  };
}

async function tick(onFault) {
  timer = setTimeout(() => tick(onFault), INTERVAL_SECONDS * 1000);
  try {
    const now = { time: performance.now() / 1000, samples: await metrics() };
    if (!timer) return; // closed meanwhile
    readings = [...readings.filter(({ time }) => now.time - time <= WINDOW_SECONDS), now];
    draw(now);
    before = now;
    onFault('');
  } catch (error) {
    onFault(`The metrics cannot be read: ${error.message}`);
  }
}

const sum = (samples, name, holds = () => true) =>
  samples.filter((sample) => sample.name === name && holds(sample.labels)).reduce((total, sample) => total + sample.value, 0);

const since = (now, name, holds) => (before ? sum(now.samples, name, holds) - sum(before.samples, name, holds) : 0);

function draw(now) {
  const seconds = before ? now.time - before.time : 1;
  const rate = (name) => Math.max(0, since(now, name)) / seconds;
  const queries = sum(now.samples, 'prefix_cache_queries_total');
  const hits = sum(now.samples, 'prefix_cache_hits_total');
  const running = sum(now.samples, 'num_requests_running');
  const waiting = sum(now.samples, 'num_requests_waiting');
  const cache = 100 * sum(now.samples, 'kv_cache_usage_perc');
  const output = rate('generation_tokens_total');
  const gap = quantile(now, 'inter_token_latency_seconds', 0.5);
  figures({
    Running: running,
    Waiting: waiting,
    'KV cache': `${cache.toFixed(1)} %`,
    'Prefix hits': queries ? `${((100 * hits) / queries).toFixed(1)} %` : '–',
    'Output tokens/s': short(output),
    'Prompt tokens/s': short(rate('prompt_tokens_total')),
    'First token, median': duration(quantile(now, 'time_to_first_token_seconds', 0.5)),
    'First token, p99': duration(quantile(now, 'time_to_first_token_seconds', 0.99)),
    'Token gap, median': duration(gap),
    Preemptions: sum(now.samples, 'num_preemptions_total'),
    'Output tokens': short(sum(now.samples, 'generation_tokens_total')),
    'Ended requests': short(sum(now.samples, 'request_success_total')),
  });
  chart('Output tokens/s', output);
  chart('Prompt tokens/s', rate('prompt_tokens_total'));
  chart('Running requests', running);
  chart('Waiting requests', waiting);
  chart('KV cache, %', cache, 100);
  chart('Token gap, median, ms', 1000 * (gap ?? 0));
}

/** A quantile of what was observed in the last minute, else ever, from the histogram's buckets; null without any. */
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

const duration = (seconds) => (seconds === null ? '–' : seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(2)} s`);

const short = (value) => value.toLocaleString('en', { maximumFractionDigits: value < 10 ? 1 : 0 });

function figures(values) {
  $('figures').replaceChildren(
    ...Object.entries(values).map(([title, value]) => {
      const group = document.createElement('div');
      group.append(
        Object.assign(document.createElement('dt'), { textContent: title }),
        Object.assign(document.createElement('dd'), { textContent: value }),
      );
      return group;
    }),
  );
}

function chart(title, value, top) {
  if (!series.has(title)) {
    const figure = document.createElement('figure');
    const picture = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    picture.setAttribute('viewBox', `0 0 ${NUM_POINTS - 1} 100`);
    picture.setAttribute('preserveAspectRatio', 'none');
    picture.setAttribute('role', 'img');
    const [area, line] = ['polygon', 'polyline'].map((kind) => document.createElementNS('http://www.w3.org/2000/svg', kind));
    picture.append(area, line);
    const [name, figures] = ['span', 'strong'].map((kind) => document.createElement(kind));
    name.textContent = title;
    const caption = document.createElement('figcaption');
    caption.append(name, figures);
    figure.append(caption, picture);
    $('charts').append(figure);
    series.set(title, { points: [], area, line, figures, picture });
  }
  const { points, area, line, figures, picture } = series.get(title);
  points.push(value);
  if (points.length > NUM_POINTS) points.shift();
  const highest = top ?? Math.max(1, ...points);
  const offset = NUM_POINTS - points.length;
  const path = points.map((each, n) => `${n + offset},${98 - (96 * each) / highest}`).join(' ');
  line.setAttribute('points', path);
  area.setAttribute('points', `${offset},100 ${path} ${NUM_POINTS - 1},100`);
  figures.textContent = `${short(value)} · peak ${short(Math.max(...points))}`;
  picture.setAttribute('aria-label', `${title}: ${figures.textContent}, over the last two minutes`);
}
