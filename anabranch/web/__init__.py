"""`anabranch web`: a cluster in the browser, by a process that is a client like any other (`docs/web.md`)."""
