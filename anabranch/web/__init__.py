"""`anabranch web`: a cluster in the browser, by a process that is a client like any other (`docs/web.md`).

`hub` polls, `pages` renders templates from the rows of `anabranch.presentation`, `actions` has what buttons do,
`guard` refuses requests, `app` has the routes, `serve` the socket. Only `client`, `presentation` and the errors of
`infra` are imported, with what is below them.
"""
