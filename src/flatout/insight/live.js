"use strict";
// Fetches the page's content anew and changes the sections that differ; what is open or focused stays so.
const EVERY_MS = 2000;
const FOCUSABLE = "a, summary, [tabindex]";
const leaves = (root) => [...root.querySelectorAll("section[id]")].filter((it) => !it.querySelector("section"));
const same = (some, others) => some.length === others.length && some.every((it, at) => it.id === others[at].id);

function replace(old, fresh) {
  for (const opened of old.querySelectorAll("details[open][id]")) {
    const twin = fresh.querySelector("#" + CSS.escape(opened.id));
    if (twin) twin.open = true;
  }
  if (old.isEqualNode(fresh)) return;
  const focused = [...old.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
  old.replaceWith(fresh);
  if (focused >= 0) fresh.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
}

async function refresh() {
  const made = document.getElementById("made");
  try {
    const answer = await fetch("content" + location.search, { cache: "no-store" });
    if (answer.status === 500) {
      made.textContent = await answer.text();
      setTimeout(refresh, EVERY_MS);
      return;
    }
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const [old, now] = [leaves(document), leaves(fresh)];
    if (same(old, now)) old.forEach((section, at) => replace(section, document.adoptNode(now[at])));
    else document.getElementById("content").replaceWith(document.adoptNode(fresh.getElementById("content")));
    made.textContent = fresh.getElementById("made").textContent;
  } catch {
    made.textContent = "The watcher does not answer: is it still running?";
  }
  setTimeout(refresh, EVERY_MS);
}
setTimeout(refresh, EVERY_MS);
