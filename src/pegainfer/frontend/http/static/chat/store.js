// Conversations kept in the browser: IndexedDB, one record a conversation. Where the browser offers none (some
// private windows), they live as long as the page does.

const NAME = "pegainfer";
const STORE = "conversations";

export class Store {
  constructor(database) {
    this.#database = database;
    this.#channel = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
  }

  #database; // null: memory only
  #memory = new Map();
  #channel;

  /** Opens the database, or falls back to memory. */
  static async open() {
    try {
      const opening = indexedDB.open(NAME, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      return new Store(await settled(opening));
    } catch {
      return new Store(null);
    }
  }

  /** Whether what is saved outlives the page. */
  get keeps() {
    return this.#database !== null;
  }

  /** All conversations, the last used first. */
  async all() {
    const found = this.#database
      ? await settled(this.#objects("readonly").getAll())
      : [...this.#memory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    return (this.#database ? await settled(this.#objects("readonly").get(id)) : this.#memory.get(id)) ?? null;
  }

  async put(conversation) {
    if (this.#database) {
      const objects = this.#objects("readwrite");
      const putting = objects.put(conversation);
      objects.transaction.commit(); // at once: the page may be about to go
      await settled(putting);
    } else this.#memory.set(conversation.id, structuredClone(conversation));
    this.#channel?.postMessage(conversation.id);
  }

  async remove(id) {
    if (this.#database) await settled(this.#objects("readwrite").delete(id));
    else this.#memory.delete(id);
    this.#channel?.postMessage(id);
  }

  /** Calls the listener with the id of a conversation that another tab saved or removed. */
  onChange(listener) {
    this.#channel?.addEventListener("message", (event) => listener(event.data));
  }

  #objects(mode) {
    return this.#database.transaction(STORE, mode).objectStore(STORE);
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
