// The shown branch as message views, painted at most once a frame while an answer grows.

import { announceBlock } from "./announcer.js";
import { MessageView } from "./message.js";
import { shownPath } from "./tree.js";

const SHARE = 4; // painting takes at most one part in so many of the time, however long an answer is

export class Transcript {
  /** `actions`: see MessageView. `follower`: told when the content grew. */
  constructor(root, actions, follower) {
    this.#root = root;
    this.#actions = actions;
    this.#follower = follower;
  }

  #root;
  #actions;
  #follower;
  #views = [];
  #live = null; // the node that grows
  #pending = false;
  #painted = 0; // when the last paint ended
  #cost = 0; // milliseconds that it took

  /** Shows a conversation's branch, keeping what did not change. `live`: the node that is being answered. */
  show(conversation, live = null) {
    const path = shownPath(conversation);
    let same = 0;
    while (same < path.length && this.#views[same]?.data === path[same]) same++;
    for (const view of this.#views.splice(same)) view.node.remove();
    this.#live = live;
    for (const node of path.slice(same)) {
      const view = new MessageView(
        node,
        this.#actions,
        (block) => this.#live === node && announceBlock(block),
      );
      this.#views.push(view);
      this.#root.append(view.node);
      if (node === live) view.update(true);
      else view.settle();
    }
    for (const view of this.#views.slice(0, same)) {
      if (view.data === live) view.update(true);
      else view.settle();
    }
    this.#follower.grown();
  }

  /** The live node has grown: it is painted soon. */
  grew() {
    if (this.#pending) return;
    this.#pending = true;
    const rest = this.#cost * (SHARE - 1) - (performance.now() - this.#painted);
    if (rest > 8) setTimeout(() => requestAnimationFrame(() => this.#paint()), rest);
    else requestAnimationFrame(() => this.#paint());
  }

  /** The live node is complete. */
  finish() {
    const view = this.#viewOf(this.#live);
    if (view) {
      view.update(false); // while still live: its last block is announced
      this.#live = null;
      view.settle();
      this.#follower.grown();
    }
    this.#live = null;
  }

  /** Puts the focus on an action of a message. */
  focus(id, ...actions) {
    const message = this.#views.find((view) => view.data.id === id)?.node;
    for (const action of actions) {
      const button = message?.querySelector(`[data-action=${action}]:not(:disabled)`);
      if (button) return button.focus();
    }
  }

  /** Edits the last message of the user's. */
  editLast() {
    this.#views.findLast((view) => view.data.role === "user")?.edit();
  }

  #paint() {
    this.#pending = false;
    const view = this.#viewOf(this.#live);
    if (!view) return;
    const start = performance.now();
    view.update(true);
    this.#follower.grown();
    this.#painted = performance.now();
    this.#cost = this.#painted - start;
  }

  #viewOf(node) {
    return node && this.#views.findLast((view) => view.data === node);
  }
}
