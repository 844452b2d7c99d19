// Images are loaded a few at a time. A browser opens six connections to a server: some stay free for what is typed.

const MOST = 4;
const waiting = new Map(); // image -> { source, done }
const busy = new Set();

function next() {
  for (const [image, { source, done }] of waiting) {
    if (busy.size >= MOST) return;
    waiting.delete(image);
    busy.add(image);
    const end = (worked) => {
      if (!busy.delete(image)) return; // it was dropped before
      done(worked);
      next();
    };
    image.addEventListener("load", () => end(true), { once: true });
    image.addEventListener("error", () => end(false), { once: true });
    image.src = source;
  }
}

export function load(image, source, done) {
  waiting.set(image, { source, done });
  next();
}

// An image that is not seen any more need not come.
export function drop(image) {
  waiting.delete(image);
  if (!busy.delete(image)) return;
  image.removeAttribute("src");
  next();
}
