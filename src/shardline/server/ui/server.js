// The server's endpoints. Paths are relative, so that a prefix of a proxy stays.

let key = sessionStorage.getItem("key") || "";
let asking = null;

document.getElementById("key-cancel").addEventListener("click", () => document.getElementById("key-dialog").close());

/** Ask the user for a key; resolves to whether there is one now. */
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key-input");
    document.getElementById("key-why").textContent = why;
    input.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      const chosen = dialog.returnValue === "use";
      if (chosen) {
        key = input.value.trim();
        sessionStorage.setItem("key", key);
      }
      asking = null;
      resolve(chosen);
    }, { once: true });
    dialog.showModal();
    input.focus();
  });
  return asking;
}

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** As fetch, with the key; a refusal becomes a ServerError with the server's own words. */
export async function call(path, { body, signal, accept } = {}) {
  for (;;) {
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (accept) headers.Accept = accept;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const options = { headers, signal, cache: "no-store" };
    if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    let answer;
    try {
      answer = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.", 0);
    }
    if (answer.ok) return answer;
    const fields = await answer.json().catch(() => ({}));
    const message = fields.error?.message || `The server answers ${answer.status}.`;
    const why = key ? "This server does not take the key. Try another one; it is kept in this tab only."
      : "This server wants a key. It is kept in this tab only.";
    if (answer.status !== 401 || !(await askForKey(why))) throw new ServerError(message, answer.status);
  }
}

/** The events of a stream as objects. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection to the server has ended in the middle of the answer.", 0);
      }
      if (chunk.done) return;
      const lines = (rest + chunk.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, 500);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Stream a chat; yields each event. */
export async function* chat(body, signal) {
  yield* events(await call("v1/chat/completions", { body: { ...body, stream: true }, signal }));
}
