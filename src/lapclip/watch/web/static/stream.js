// New events as they come. A browser allows few connections to one server, so of all tabs that show a run only one
// listens, and tells the others; a tab that is not seen lets another one do it.

const streams = new Map(); // name -> { stop }

function listen(name, position, handle) {
  const source = new EventSource(`/runs/${encodeURIComponent(name)}/events?after=${encodeURIComponent(position())}`);
  return new Promise((resolve) => {
    const end = (kind) => { source.close(); handle({ kind }); resolve(); };
    source.onmessage = (message) => {
      try { handle({ kind: "event", event: JSON.parse(message.data) }); } catch { /* a damaged line is passed over */ }
    };
    source.addEventListener("restart", () => handle({ kind: "restart" }));
    source.addEventListener("end", () => end("end"));
    source.addEventListener("gone", () => end("gone"));
    source.onerror = () => { if (source.readyState === EventSource.CLOSED) resolve(); };
    source.stop = () => { source.close(); resolve(); };
    streams.get(name).source = source;
  });
}

function start(name, position, handle) {
  const stopping = new AbortController();
  const channel = typeof BroadcastChannel === "function" ? new BroadcastChannel(`lapclip ${name}`) : null;
  const entry = { source: null };
  streams.set(name, entry);
  if (channel) channel.onmessage = (message) => handle(message.data);
  const tell = (message) => { handle(message); if (channel) channel.postMessage(message); };
  const work = () => (stopping.signal.aborted ? null : listen(name, position, tell));
  // Locks exist on this machine's own addresses and over https; elsewhere each tab that is seen listens for itself.
  const done = navigator.locks
    ? navigator.locks.request(`lapclip ${name}`, { signal: stopping.signal }, work).catch(() => {})
    : Promise.resolve(work());
  entry.stop = () => {
    stopping.abort();
    if (entry.source) entry.source.stop();
    if (channel) channel.close();
    streams.delete(name);
  };
  done.then(() => { if (streams.get(name) === entry) entry.stop(); });
}

// Listen to these runs, and to no others: [name, position] each, where position() is what the tab knows already.
export function follow(wanted, handle) {
  const names = wanted.map(([name]) => name);
  for (const [name, entry] of streams) if (!names.includes(name)) entry.stop();
  for (const [name, position] of wanted) if (!streams.has(name)) start(name, position, (message) => handle(name, message));
}
