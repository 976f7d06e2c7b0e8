// The open conversation and what can be done with it. Answers go on when another conversation is opened.

import { announce } from "./announcer.js";
import { Generation } from "./generation.js";
import { startSettings } from "./settings.js";
import { ROOT, addNode, leafId, newConversation, siblings, step, titleOf } from "./tree.js";

const SAVE_EVERY = 2000; // milliseconds, while an answer grows

export class Session {
  /**
   * @param store where conversations are kept
   * @param hooks {model() → name, shown(), grew(), finished(), listed(), unsaved(error)}: what the page does
   *   about changes of the open conversation (shown: its branch; grew, finished: its live answer) and of the list
   */
  constructor(store, hooks) {
    this.#store = store;
    this.#hooks = hooks;
    this.conversation = newConversation(startSettings());
  }

  #store;
  #hooks;
  #running = new Map(); // conversation's id → its Generation

  /** The node that is being answered in the open conversation, or null. */
  get live() {
    return this.#running.get(this.conversation.id)?.node ?? null;
  }

  start() {
    this.#open(newConversation(startSettings()));
  }

  /** Opens a kept conversation; false where there is none of that id. */
  async open(id) {
    const conversation = this.#running.get(id)?.conversation ?? (await this.#store.get(id));
    if (!conversation) return false;
    this.#open(conversation);
    return true;
  }

  /** Reads the open conversation again where another tab changed it. */
  async reread(id) {
    if (id !== this.conversation.id || this.live) return;
    const conversation = await this.#store.get(id);
    if (conversation) this.#open(conversation);
  }

  async change(id, fields) {
    const open = id === this.conversation.id ? this.conversation : this.#running.get(id)?.conversation;
    const conversation = open ?? (await this.#store.get(id));
    Object.assign(conversation, fields);
    if (conversation.nodes[ROOT].children.length) await this.#save(conversation);
  }

  async remove(id) {
    this.#running.get(id)?.stop();
    this.#running.delete(id);
    await this.#store.remove(id);
    if (id === this.conversation.id) this.start();
    this.#hooks.listed();
  }

  send(text) {
    const { conversation } = this;
    if (!conversation.title) conversation.title = titleOf(text);
    const user = addNode(conversation, leafId(conversation), { role: "user", content: text });
    this.#answer(user.id);
  }

  /** Another answer beside this one. */
  again(node) {
    this.#answer(node.parent);
  }

  /** A changed message beside the old one; a user's is answered. */
  edit(node, text) {
    const fields =
      node.role === "user" ? {} : { model: node.model, finish: "edited", reasoning: node.reasoning };
    const added = addNode(this.conversation, node.parent, { role: node.role, content: text, ...fields });
    if (node.role === "user") return this.#answer(added.id);
    this.#hooks.shown();
    return this.#save(this.conversation);
  }

  /** Lets the model go on with an answer that was cut off. */
  goOn(node) {
    this.#generate(node, true);
  }

  /** The results of an answer's calls, in their order; they are answered. */
  results(node, texts) {
    let parent = node.id;
    node.calls.forEach((call, i) => {
      const fields = { role: "tool", content: texts[i], callId: call.id, name: call.name };
      parent = addNode(this.conversation, parent, fields).id;
    });
    this.#answer(parent);
  }

  /** Shows the branch `by` places on; returns its first message, or null at the end. */
  switchTo(node, by) {
    const shown = step(this.conversation, node, by);
    if (shown) {
      this.#hooks.shown();
      this.#save(this.conversation);
    }
    return shown;
  }

  siblings(node) {
    return siblings(this.conversation, node);
  }

  /** Stops the answer of the open conversation; whether there was one. */
  stop() {
    const generation = this.#running.get(this.conversation.id);
    generation?.stop();
    return generation !== undefined;
  }

  /** The page is about to go: what runs is saved as it stands. */
  leave() {
    for (const generation of this.#running.values()) {
      generation.leave();
      this.#keep(generation.conversation);
    }
  }

  #open(conversation) {
    this.conversation = conversation;
    this.#hooks.shown();
  }

  #answer(parentId) {
    this.#generate(
      addNode(this.conversation, parentId, { role: "assistant", content: "", finish: null }),
      false,
    );
  }

  async #generate(node, goesOn) {
    const { conversation } = this;
    const isOpen = () => this.conversation.id === conversation.id;
    let saved = performance.now();
    const changed = () => {
      if (this.#running.get(conversation.id) !== generation) return; // removed meanwhile
      if (isOpen()) this.#hooks.grew();
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        this.#keep(conversation);
      }
    };
    const generation = new Generation(conversation, node, this.#hooks.model(), { changed, goesOn });
    this.#running.set(conversation.id, generation);
    this.#hooks.shown();
    this.#save(conversation); // nothing here waits for the disk
    announce("Answering.");
    await generation.run();
    if (this.#running.get(conversation.id) !== generation) return; // removed meanwhile
    this.#running.delete(conversation.id);
    if (isOpen()) {
      this.#hooks.finished();
      announce(endingOf(node));
    }
    await this.#save(conversation);
  }

  async #save(conversation) {
    conversation.updated = Date.now();
    await this.#keep(conversation);
    this.#hooks.listed();
  }

  async #keep(conversation) {
    try {
      await this.#store.put(conversation);
    } catch (error) {
      this.#hooks.unsaved(error);
    }
  }
}

/** How an answer ended, for those who do not see it. */
function endingOf(node) {
  if (node.error) return `No answer: ${node.error.message}`;
  return node.finish === "stopped" ? "Stopped." : "The answer is complete.";
}
