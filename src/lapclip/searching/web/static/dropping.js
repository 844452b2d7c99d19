// An image as the question: dropped, pasted or chosen. It is sent to this machine's own server and nowhere else.

import { byId, show } from "./elements.js";

const LARGEST = 50_000_000; // bytes, as the server has it

export function listenForImages(found, refused) {
  async function take(files) {
    const file = [...(files || [])][0];
    if (!file) return;
    if (file.size > LARGEST) { refused(`${file.name} is too large to search by.`); return; }
    try {
      const answer = await fetch("/asked", { method: "POST", body: file });
      if (answer.ok) found((await answer.json()).image);
      else refused(`${file.name} cannot be searched by: ${(await answer.text()).trim()}`);
    } catch {
      refused("The server does not answer.");
    }
  }

  const isFile = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    show("drop", true);
  });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) show("drop", false); });
  addEventListener("drop", (event) => {
    show("drop", false);
    if (!isFile(event)) return;
    event.preventDefault(); // or the browser would open it
    take(event.dataTransfer.files);
  });
  addEventListener("paste", (event) => {
    if (!event.clipboardData || !event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  byId("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
}
