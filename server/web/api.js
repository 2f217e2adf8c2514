// Talks to the server: JSON, server-sent events, and Prometheus text. Knows nothing of the page.

const base = new URL('.', document.baseURI);

export class ApiError extends Error {
  constructor(status, message, { code, retryAfter } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get: () => sessionStorage.getItem('jaxllm-key') || '',
  set: (value) => (value ? sessionStorage.setItem('jaxllm-key', value) : sessionStorage.removeItem('jaxllm-key')),
};

export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const reply = await fetch(new URL(path, base), { ...options, headers });
  if (reply.ok) return reply;
  let error = {};
  try {
    error = (await reply.json()).error || {};
  } catch {
    // no JSON: the status has to do
  }
  const retryAfter = Number(reply.headers.get('Retry-After')) || 2;
  throw new ApiError(reply.status, error.message || `the server answered ${reply.status}`, { code: error.code, retryAfter });
}

export const models = async () => (await (await request('v1/models')).json()).data;

/** Yields the JSON objects of a streamed chat completion. Throws ApiError for an error event. */
export async function* chat(body, signal) {
  const reply = await request('v1/chat/completions', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  let isDone = false;
  while (!isDone) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, 'the answer broke off: the connection was closed');
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      const data = event.split('\n').filter((line) => line.startsWith('data:')).map((line) => line.slice(5).trim()).join('\n');
      if (!data) continue; // a keep-alive comment
      if (data === '[DONE]') {
        isDone = true;
        break;
      }
      const object = JSON.parse(data);
      if (object.error) throw new ApiError(500, object.error.message, { code: object.error.code });
      yield object;
    }
  }
  reader.cancel().catch(() => {});
}

/** The samples of /metrics: [{name, labels, value}]. */
export async function metrics() {
  const text = await (await request('metrics')).text();
  const samples = [];
  for (const line of text.split('\n')) {
    const found = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] || '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    samples.push({ name: found[1].replace(/^\w+:/, ''), labels, value: Number(found[3].replace('Inf', 'Infinity')) });
  }
  return samples;
}

/** The sum of a metric's samples, of those with a label's value if one is named. */
export const sum = (samples, name, label, wanted) =>
  samples.filter((sample) => sample.name === name && (!label || sample.labels[label] === wanted)).reduce((total, { value }) => total + value, 0);

/** The mean of a metric's samples. */
export const mean = (samples, name) => sum(samples, name) / (samples.filter((sample) => sample.name === name).length || 1);

/** The program that requests wait for, as text, and how many percent of those that they wait for are ready; null if they wait for none. */
export function compiling(samples) {
  const [ready, missing] = ['ready', 'missing'].map((state) => sum(samples, 'awaited_programs', 'state', state));
  const total = ready + missing;
  return missing ? { text: `Compiling program ${ready + 1} of ${total}`, percent: (100 * ready) / total } : null;
}
