"""Many replicas of the server behind Ray Serve: `inferscale deploy ray`; see docs/deploy.md.

    client ─▶ Serve's HTTP proxy ─▶ front ─▶ Serve's consistent-hash router ─▶ a replica
                                     │ reads whose memory a request names       │ the application of
                                     └ that is the key of the ring              └ `inferscale serve`, whole

`affinity` reads the key, `asgi` runs an application without a socket, `front` sends requests on, `engine`
builds vLLM's application, `settings` says what can be set. None of them knows Ray; `ray_serve` alone imports
it.
"""
