// Events of the server as JSON values. EventSource cannot send a key, so this reads with fetch.

const SILENCE_MS = 15000; // a connection that says nothing for so long is dead

const heard = (promise) =>
  promise.catch(() => {
    throw new Refusal(0, "the server does not answer");
  });

export const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get wantsKey() {
    return this.status === 401 || this.status === 403;
  }
}

// The answer, or a Refusal with the server's own words.
export async function ask(path, options) {
  const answer = await heard(fetch(new URL(path, document.baseURI), { cache: "no-store", ...options }));
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refusal(answer.status, body?.error?.message ?? `the server answered ${answer.status}`);
}

export async function* events(path, key) {
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const answer = await ask(path, { headers: headers(key), signal: abort.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part; !(part = await heard(reader.read())).done; ) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
      const frames = (rest + part.value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) yield JSON.parse(frame.replace(/^data: /, ""));
    }
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
}
