// Keeps the page as it is now: the server sends its sections whenever they change.
"use strict";
(() => {
  const body = document.getElementById("body");
  const trouble = document.getElementById("trouble");
  const state = document.getElementById("live");
  if (!body || !window.EventSource) return;

  function say(words, kind) {
    if (state.textContent !== words) state.textContent = words;
    state.className = kind;
  }

  function put(old, fresh) {
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    if (focused && focused.tagName === "INPUT") return; // a person types
    const opened = [...old.querySelectorAll("details[open]")].map((each) => each.id);
    const scrolled = [...old.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    const key = focused && (focused.id ? "#" + CSS.escape(focused.id)
      : focused.getAttribute("href") && `[href="${CSS.escape(focused.getAttribute("href"))}"]`);
    for (const id of opened) fresh.querySelector("#" + CSS.escape(id))?.setAttribute("open", "");
    old.replaceWith(fresh);
    fresh.querySelectorAll(".scroll").forEach((each, i) => { each.scrollLeft = scrolled[i] || 0; });
    if (key) fresh.querySelector(key)?.focus({ preventScroll: true });
  }

  function renew(html) {
    const next = new DOMParser().parseFromString(html, "text/html").body;
    const fresh = [...next.children], old = [...body.children];
    if (fresh.length !== old.length || fresh.some((each, i) => each.id !== old[i].id)) {
      body.replaceChildren(...fresh);
      return;
    }
    fresh.forEach((each, i) => { if (each.outerHTML !== old[i].outerHTML) put(old[i], each); });
  }

  const source = new EventSource(location.pathname + location.search);
  source.onmessage = (event) => {
    const told = JSON.parse(event.data);
    if (told.html !== null) renew(told.html);
    trouble.textContent = told.trouble;
    trouble.hidden = !told.trouble;
    if (told.trouble) say("not fresh", "bad"); else say("live", "good");
  };
  source.onerror = () => {
    if (source.readyState !== EventSource.CLOSED) {
      say("no connection, trying again", "bad");
      return;
    }
    // The server has refused: perhaps this person may not look any more.
    body.replaceChildren();
    say("ended: reload the page", "bad");
  };
  addEventListener("pagehide", () => source.close());
})();
