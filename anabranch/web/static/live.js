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

  // Of an answer that may be another one soon: a server that restarts, a proxy without its server, a limit.
  const PASSING = [408, 429, 500, 502, 503, 504];
  let source = null, pause = 0;

  function follow() {
    source = new EventSource(location.pathname + location.search);
    source.onmessage = (event) => {
      const told = JSON.parse(event.data);
      pause = 0;
      if (told.html !== null) renew(told.html);
      trouble.textContent = told.trouble;
      trouble.hidden = !told.trouble;
      if (told.trouble) say("not fresh", "bad"); else say("live", "good");
    };
    source.onerror = () => {
      say("no connection, trying again", "bad");
      if (source.readyState === EventSource.CLOSED) ask();
    };
  }

  // The server has refused, and an EventSource does not say why: perhaps this person may not look any more.
  async function ask() {
    let status = 0;
    try {
      status = (await fetch(location.href, { method: "HEAD", cache: "no-store" })).status;
    } catch { /* no connection */ }
    if (status !== 0 && status !== 200 && !PASSING.includes(status)) {
      body.replaceChildren();
      say("ended: reload the page", "bad");
      return;
    }
    pause = Math.min(60, 2 * pause || 2);
    setTimeout(follow, 1000 * pause);
  }

  follow();
  addEventListener("pagehide", () => source.close());
})();
