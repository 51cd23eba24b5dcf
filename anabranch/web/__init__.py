"""`anabranch web` shows a cluster in the browser. The web process is a client like any other (`docs/web.md`).

`hub` polls, `pages` renders templates from the rows of `anabranch.presentation`, `actions` carries out what buttons
ask for, `guard` refuses requests, `app` has the routes, `serve` the socket. Modules here import only `client`,
`presentation`, the errors of `infra`, and the layers under them.
"""
