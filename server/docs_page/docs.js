'use strict';
const element = (tag, text, ...children) => {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
};
const nameOf = (schema) => {
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.anyOf || schema.oneOf) return (schema.anyOf || schema.oneOf).map(nameOf).join(' | ');
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' | ');
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === 'array') return `list of ${nameOf(schema.items || {})}`;
  return schema.type || 'any';
};
const fields = (schema) => {
  const table = element('table');
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const needed = (schema.required || []).includes(name) ? 'required' : '';
    const row = [element('td', '', element('code', name)), element('td', nameOf(field)), element('td', needed)];
    table.append(element('tr', '', ...row));
  }
  return table;
};
const show = (found) => {
  const main = document.querySelector('main');
  main.replaceChildren();
  const schemas = (found.components || {}).schemas || {};
  for (const [path, methods] of Object.entries(found.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const details = element('details');
      details.append(element('summary', '', element('b', method.toUpperCase()), element('code', path)));
      details.append(element('p', about.description || about.summary || ''));
      const body = about.requestBody && about.requestBody.content['application/json'];
      if (body) details.append(fields(schemas[nameOf(body.schema)] || body.schema));
      main.append(details);
    }
  }
  main.append(element('h2', 'Objects'));
  for (const [name, schema] of Object.entries(schemas)) {
    const details = element('details');
    details.append(element('summary', '', element('code', name)), element('p', schema.description || ''), fields(schema));
    main.append(details);
  }
};
const load = async () => {
  const key = sessionStorage.getItem('jaxllm-key') || '';
  const reply = await fetch('openapi.json', { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (reply.status === 401) {
    const given = prompt('API key');
    if (given) {
      sessionStorage.setItem('jaxllm-key', given);
      return load();
    }
  }
  if (reply.ok) return show(await reply.json());
  document.querySelector('main').textContent = `the server answered ${reply.status}`;
};
load();
