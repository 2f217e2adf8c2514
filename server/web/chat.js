// The conversation: sends it, shows what streams back, and lets it be stopped, repeated, copied and saved.

import { chat } from './api.js';
import { markdown } from './markdown.js';
import { sampling, settings } from './settings.js';

const $ = (id) => document.getElementById(id);
const STORE = 'jaxllm-conversation';
let messages = load();
let running = null; // the AbortController of the answer that streams
let isReady = false;
let currentModel = () => '';

/** Whether the server takes requests. */
export function setReady(ready) {
  isReady = ready;
  buttons();
}

export function startChat(chosenModel) {
  currentModel = chosenModel;
  const ask = (text) => {
    messages.push({ role: 'user', content: text });
    show(messages.at(-1));
    $('messages').scrollTop = $('messages').scrollHeight;
    answer();
  };
  const send = () => {
    const text = $('prompt').value;
    if (!text.trim() || running || !isReady) return;
    $('prompt').value = '';
    fit();
    ask(text);
  };
  $('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  for (const example of $('welcome').querySelectorAll('button')) {
    example.addEventListener('click', () => {
      $('prompt').focus();
      ask(example.textContent);
    });
  }
  $('prompt').addEventListener('input', fit);
  $('prompt').addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && running && !$('settings').open) running.abort();
    if (event.key === '/' && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName) && !$('chat').hidden) {
      event.preventDefault();
      $('prompt').focus();
    }
  });
  $('stop').addEventListener('click', () => running?.abort());
  $('regenerate').addEventListener('click', () => {
    while (messages.at(-1)?.role === 'assistant') messages.pop();
    redraw();
    answer();
  });
  $('new-chat').addEventListener('click', () => {
    running?.abort();
    messages = [];
    redraw();
    $('prompt').focus();
  });
  $('export').addEventListener('click', () => {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([JSON.stringify({ model: currentModel(), messages: sent() }, null, 2)], { type: 'application/json' }));
    link.download = 'conversation.json';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  $('copy-curl').addEventListener('click', () => copy(curl(body()), $('copy-curl')));
  $('messages').addEventListener('click', (event) => {
    if (event.target.matches('.copy-code')) copy(event.target.parentElement.querySelector('code').textContent, event.target);
  });
  redraw();
}

function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(messages));
  } catch {
    // full or forbidden: the conversation then lives as long as the page
  }
}

/** The messages as the API takes them: without what only this page shows. */
const sent = () => [
  ...(settings().system ? [{ role: 'system', content: settings().system }] : []),
  ...messages.filter((message) => !message.fault).map(({ role, content, tool_calls, tool_call_id }) => ({
    role,
    content: content ?? '',
    ...(tool_calls?.length ? { tool_calls } : {}),
    ...(tool_call_id ? { tool_call_id } : {}),
  })),
];

const body = () => ({ model: currentModel(), messages: sent(), ...sampling() });

const curl = (json) =>
  `curl ${new URL('v1/chat/completions', document.baseURI)} -H 'Content-Type: application/json' ` +
  `-H "Authorization: Bearer $JAXLLM_API_KEY" -d '${JSON.stringify(json).replaceAll("'", "'\\''")}'`;

async function answer() {
  const message = { role: 'assistant', content: '', reasoning: '', tool_calls: [] };
  const json = body();
  messages.push(message);
  const article = show(message);
  $('announced').textContent = '';
  running = new AbortController();
  buttons();
  const start = performance.now();
  let firstToken = 0;
  let frame = 0;
  let usage = null;
  let finish = null;
  const draw = () => {
    frame = 0;
    fill(article, message, true);
  };
  try {
    for await (const chunk of chat(json, running.signal)) {
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason || finish;
      if (add(message, choice.delta || {}) && !firstToken) firstToken = performance.now();
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === 'AbortError') finish = 'stopped by you';
    else {
      message.fault = error.message;
      finish = 'failed';
    }
  }
  cancelAnimationFrame(frame);
  const seconds = (performance.now() - (firstToken || start)) / 1000;
  const notes = [];
  const wait = firstToken - start;
  if (firstToken) notes.push(`first token ${wait < 1000 ? `${wait.toFixed(0)} ms` : `${(wait / 1000).toFixed(2)} s`}`);
  if (usage && usage.completion_tokens > 1 && seconds > 0) notes.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (usage) notes.push(`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out`);
  if (finish && finish !== 'stop') notes.push({ length: 'cut off: no more tokens allowed', tool_calls: 'calls a tool' }[finish] || finish);
  message.notes = notes;
  running = null;
  $('announced').textContent = message.fault ? `The answer failed: ${message.fault}` : 'The answer is complete.';
  fill(article, message, false);
  save();
  buttons();
}

/** Takes a delta over. Returns whether it said anything. */
function add(message, delta) {
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) message.reasoning += reasoning;
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls || []) {
    const known = (message.tool_calls[call.index ?? 0] ||= { id: '', type: 'function', function: { name: '', arguments: '' } });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.function.name += call.function.name;
    if (call.function?.arguments) known.function.arguments += call.function.arguments;
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

function show(message) {
  const article = document.createElement('article');
  article.className = message.role;
  $('messages').append(article);
  fill(article, message, message === messages.at(-1) && message.role === 'assistant' && !message.notes);
  return article;
}

function fill(article, message, isStreaming) {
  const log = $('messages');
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const wasOpen = [...article.querySelectorAll('details')].map((node) => node.open);
  const parts = [heading(message.role)];
  if (message.role === 'tool') {
    article.replaceChildren(...parts, fold(`Result of ${message.name}`, message.content));
    return;
  }
  if (message.reasoning) parts.push(fold(isStreaming && !message.content ? 'Thinking…' : 'Thoughts', message.reasoning));
  const text = document.createElement('div');
  text.className = 'body';
  text.append(message.role === 'user' ? message.content : markdown(message.content || (isStreaming && !message.reasoning ? '…' : '')));
  parts.push(text);
  for (const call of (message.tool_calls || []).filter(Boolean)) {
    parts.push(fold(`Calls ${call.function.name}`, call.function.arguments));
    if (!isStreaming && !message.fault && call.id && !isAnswered(call)) parts.push(resultForm(message, call));
  }
  if (message.fault) parts.push(Object.assign(document.createElement('p'), { className: 'fault', textContent: `This failed: ${message.fault}` }));
  if (message.notes) parts.push(notes(message));
  article.replaceChildren(...parts);
  article.querySelectorAll('details').forEach((node, n) => (node.open = wasOpen[n] ?? false));
  if (follows) log.scrollTop = log.scrollHeight;
}

const heading = (role) => Object.assign(document.createElement('h2'), { className: 'unseen', textContent: { user: 'You', assistant: 'Answer', tool: 'Tool' }[role] || role });

function fold(title, text) {
  const node = document.createElement('details');
  const inner = Object.assign(document.createElement('div'), { className: 'body', textContent: text });
  node.append(Object.assign(document.createElement('summary'), { textContent: title }), inner);
  return node;
}

const isAnswered = (call) => messages.some((message) => message.tool_call_id === call.id);

/** Asks for what a tool gave back; once all calls of the message have it, the model goes on. */
function resultForm(message, call) {
  const form = Object.assign(document.createElement('form'), { className: 'result' });
  const field = Object.assign(document.createElement('input'), { required: true, placeholder: 'What it gave back', ariaLabel: `Result of ${call.function.name}` });
  form.append(field, Object.assign(document.createElement('button'), { textContent: 'Send result' }));
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    if (running || !isReady) return;
    messages.push({ role: 'tool', tool_call_id: call.id, name: call.function.name, content: field.value });
    redraw();
    if (message.tool_calls.filter(Boolean).every(isAnswered)) answer();
  });
  return form;
}

function notes(message) {
  const footer = document.createElement('footer');
  for (const note of message.notes) footer.append(Object.assign(document.createElement('span'), { textContent: note }));
  if (message.content) {
    const button = Object.assign(document.createElement('button'), { type: 'button', textContent: 'Copy' });
    button.addEventListener('click', () => copy(message.content, button));
    footer.append(button);
  }
  return footer;
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = 'Copied';
  } catch {
    button.textContent = 'Not allowed';
  }
  setTimeout(() => (button.textContent = label), 1200);
}

function redraw() {
  $('messages').replaceChildren();
  messages.forEach(show);
  save();
  buttons();
}

function buttons() {
  const isEmpty = !messages.length;
  $('send').hidden = Boolean(running);
  $('send').disabled = !isReady;
  $('stop').hidden = !running;
  $('regenerate').disabled = Boolean(running) || isEmpty || !isReady;
  $('new-chat').disabled = $('export').disabled = $('copy-curl').disabled = isEmpty;
  $('welcome').hidden = !isEmpty;
  $('messages').hidden = isEmpty;
  for (const example of $('welcome').querySelectorAll('button')) example.disabled = !isReady;
}

function fit() {
  const field = $('prompt');
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight + 2}px`;
}
