// Conversations in the browser's own database. They outlive the server and the tab.

const STORE = "conversations";
let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("shardline", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, use) {
  const store = (await open()).transaction(STORE, mode).objectStore(STORE);
  return new Promise((resolve, reject) => {
    const request = use(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** All conversations, the latest first. */
export async function load() {
  return (await run("readonly", (store) => store.getAll())).sort((a, b) => b.changed - a.changed);
}
export const save = (conversation) => run("readwrite", (store) => store.put(conversation));
export const forget = (id) => run("readwrite", (store) => store.delete(id));
