"""GET /openapi.json and /docs: the endpoints as a document, and a self-contained page that shows it."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>jaxllm: endpoints</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
summary { cursor: pointer; padding: .3rem 0 } code, pre { font-family: ui-monospace, monospace; font-size: 90% }
b { display: inline-block; min-width: 4rem } pre { overflow: auto; border: 1px solid #8886; padding: .5rem }
td { vertical-align: top; padding: .1rem 1rem .1rem 0 }
</style>
<h1>Endpoints</h1>
<p>The document itself: <a href="openapi.json">openapi.json</a></p>
<main>…</main>
<script src="docs.js"></script>
</html>
"""
_SCRIPT = """'use strict';
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
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
PUBLIC_PATHS = frozenset({"/docs", "/docs.js"})
"""The pages contain no data of this server; the document they show requires the key."""


@router.get("/openapi.json")
async def openapi(request: Request) -> dict[str, Any]:
    """The endpoints as an OpenAPI document."""
    return request.app.openapi()


@router.get("/docs")
async def docs() -> Response:
    """The page."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/docs.js")
async def script() -> Response:
    """Its script."""
    return Response(_SCRIPT, media_type="text/javascript", headers=_HEADERS)
