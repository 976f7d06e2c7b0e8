// One answer on its way: the request, what arrives of it, and its figures.

import { ApiError, events, request } from "../lib/api.js";
import { requestFields } from "./settings.js";
import { toMessages } from "./tree.js";

const RATE_AFTER = 0.02; // seconds: over less, what comes is one burst and no rate

export class Generation {
  /**
   * @param conversation the tree that holds `node`
   * @param node the assistant's node that is filled; what it has is gone on from where `goesOn`
   * @param changed called after each piece that arrived
   */
  constructor(conversation, node, model, { changed, goesOn = false }) {
    this.conversation = conversation;
    this.node = node;
    this.#model = model;
    this.#changed = changed;
    this.#goesOn = goesOn;
  }

  #model;
  #changed;
  #goesOn;
  #abort = new AbortController();
  #left = false;
  #sent = 0; // milliseconds, of performance.now()
  #first = 0; // when the first token came

  stop() {
    this.#abort.abort();
  }

  /** The page is about to go: how the connection ends from now on is not noted. */
  leave() {
    this.#left = true;
  }

  /** Fills the node until the answer ends, however it ends: `node.finish` and `node.error` say how. */
  async run() {
    const { node } = this;
    node.error = null;
    node.finish = null;
    node.figures = {};
    node.model = this.#model;
    this.#sent = performance.now();
    try {
      const response = await request("/v1/chat/completions", {
        body: this.#body(),
        signal: this.#abort.signal,
      });
      for await (const event of events(response)) {
        this.#take(event);
        this.#changed();
      }
    } catch (error) {
      if (this.#left) return; // the browser broke the connection: that is nobody's error
      if (error.name === "AbortError") node.finish = "stopped";
      else {
        const { status = 0, code = null, retryAfter = null } = error;
        node.finish = "error";
        node.error = { status, code, retryAfter, message: error.message };
        if (!(error instanceof ApiError)) console.error(error);
      }
    }
    node.figures.seconds = (performance.now() - this.#sent) / 1000;
    this.#changed();
  }

  #body() {
    const { conversation, node } = this;
    return {
      model: this.#model,
      messages: toMessages(conversation, this.#goesOn ? node.id : node.parent),
      ...requestFields(conversation.settings),
      ...(this.#goesOn ? { continue_final_message: true } : {}),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }

  #take(event) {
    const { node } = this;
    const choice = event.choices[0];
    const delta = choice?.delta ?? {};
    const tokens = event.usage?.completion_tokens ?? 0;
    if (!this.#first && (tokens > 0 || delta.content || delta.reasoning_content)) {
      this.#first = performance.now();
      node.figures.ttft = (this.#first - this.#sent) / 1000;
    }
    if (delta.reasoning_content) {
      node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    }
    if (delta.content) {
      node.content += delta.content;
      if (node.reasoning) node.figures.thought ??= (performance.now() - this.#first) / 1000;
    }
    for (const call of delta.tool_calls ?? []) {
      const known = (node.calls ??= [])[call.index];
      if (known) known.arguments += call.function.arguments;
      else node.calls.push({ id: call.id, name: call.function.name, arguments: call.function.arguments });
    }
    if (choice?.finish_reason) node.finish = choice.finish_reason;
    if (event.usage) this.#count(event.usage);
  }

  #count(usage) {
    const { figures } = this.node;
    const tokens = usage.completion_tokens;
    if (tokens !== figures.tokens) {
      // The first token's time is the prompt's: the rate is that of those after it.
      const seconds = (performance.now() - this.#first) / 1000;
      if (tokens > 1 && seconds > RATE_AFTER) figures.rate = (tokens - 1) / seconds;
    }
    figures.tokens = tokens;
    figures.prompt = usage.prompt_tokens;
    figures.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
}
