"""`anabranch web` shows a cluster in the browser. The web process is a client like any other (`docs/web.md`).

Start in `app`, which has the routes of pages, their live updates, and actions that people confirm.

- `pages` renders templates from the rows of `anabranch.presentation`.
- `events` and `tables` read events and rows, within bounds.
- `charts` takes samples of the cluster, and draws the last hour.
- `hub` polls the cluster once for all browsers that show the same page.
- `actions` has the actions of buttons: a plan that people confirm, then the call.
- `guard` refuses requests of other hosts and origins, and keeps confirmations; `login` finds users.
- `serve` listens, and runs the server.

Modules here import only `client`, `presentation`, the errors of `infra`, and the layers under them.
"""
