// The server's API: requests with the key where one is needed, errors as one kind, streams as events.

import { askText } from "./dialog.js";

const KEY = "api-key"; // in sessionStorage: it is gone with the tab

export class ApiError extends Error {
  /** `status` 0: no answer came. `retryAfter`: seconds, or null. */
  constructor(status, message, { code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

let asking = null; // the dialog that asks for a key now: one for all requests that wait for it

function askKey(note) {
  asking ??= askText("This server wants an API key", {
    label: "API key",
    type: "password",
    action: "Use this key",
    note: `${note} It stays in this tab and is forgotten when the tab closes.`,
  }).finally(() => (asking = null));
  return asking;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Asks for another key. */
export async function changeKey() {
  const key = await askKey("");
  if (key) sessionStorage.setItem(KEY, key);
}

/**
 * One request; resolves to the Response of an answer below 400. Where the server wants a key, the user is
 * asked for one and the request is sent again. Throws ApiError, or AbortError where `signal` fired.
 */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = storedKey();
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await send(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || key !== storedKey()) {
      if (response.status === 401) continue; // another request has got a key meanwhile
      throw error;
    }
    const given = await askKey(key ? "The server does not know the key that this tab has." : "");
    if (!given) throw error;
    sessionStorage.setItem(KEY, given);
  }
}

async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server did not answer.");
  }
}

async function errorOf(response) {
  const wait = Number(response.headers.get("retry-after"));
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Something between this page and the server answered in its own words; the status has to do.
  }
  return new ApiError(
    response.status,
    String(detail.message ?? `The answer was status ${response.status}.`),
    {
      code: detail.code,
      param: detail.param,
      retryAfter: wait > 0 ? wait : null,
    },
  );
}

/** The served models: [{id, root, max_model_len}]. */
export async function models() {
  return (await (await request("/v1/models")).json()).data;
}

/**
 * The events of a stream, JSON decoded, until `[DONE]`. Throws ApiError for an error event, and for a stream
 * that ends without one.
 */
export async function* events(response) {
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, String(event.error.message), event.error);
    yield event;
  }
  throw new ApiError(0, "The connection ended in the middle of the answer.");
}

/** The data of each server-sent event. Comments (keep-alive) are passed over. */
async function* dataOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim(); // this API: one data line an event
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What the user can do about an error, in a sentence. */
export function remedy(error) {
  if (error.status === 0) return "Check that the server runs and try again.";
  if (error.status === 401) return "Give a key that the server knows: Settings, then API key.";
  if (error.status === 404 && error.code === "model_not_found") return "Choose a model below.";
  if (error.status === 413)
    return "Start a new conversation, or shorten this one by editing an earlier message.";
  if (error.status === 504) return "The server was busy for too long; try again.";
  if (error.status === 503) {
    const wait = error.retryAfter ? ` in ${error.retryAfter} s` : " in a moment";
    return `The server takes no requests now; try again${wait}.`;
  }
  if (error.status === 400 && /max_model_len|context|too long|tokens/.test(error.message)) {
    return "Shorten the conversation, or lower “Max tokens” in the settings.";
  }
  if (error.status === 400) return "Change the setting that the message names.";
  return "Try again; the server's log may say more.";
}
