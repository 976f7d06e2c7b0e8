// Keeps the end of the conversation in view while it grows, unless the user has scrolled away from it.

const NEAR = 48; // pixels from the end that still count as being there

export class Follower {
  /** `content` grows within `scroller`; `away` is shown while its end is out of view and not followed. */
  constructor(scroller, content, away) {
    this.#scroller = scroller;
    this.#away = away;
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this.#leave(), { passive: true });
    away.addEventListener("click", () => this.toEnd());
    const sizes = new ResizeObserver(() => this.grown());
    sizes.observe(scroller);
    sizes.observe(content);
  }

  #scroller;
  #away;
  #following = true;
  #last = 0;

  /** Goes to the end and stays there. */
  toEnd() {
    this.#following = true;
    this.grown();
  }

  /** Call after the content changed. */
  grown() {
    if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#last = this.#scroller.scrollTop;
    this.#show();
  }

  /** Leaves the place where it is, e.g. when an earlier branch is shown. */
  stay() {
    this.#following = false;
    this.#show();
  }

  #scrolled() {
    const top = this.#scroller.scrollTop;
    if (this.#distance() < NEAR) this.#following = true;
    else if (top < this.#last - 1) this.#following = false;
    this.#last = top;
    this.#show();
  }

  #leave() {
    if (this.#scroller.scrollTop > 0) this.#following = false;
  }

  #distance() {
    return this.#scroller.scrollHeight - this.#scroller.clientHeight - this.#scroller.scrollTop;
  }

  #show() {
    this.#away.hidden = this.#distance() < NEAR;
  }
}
