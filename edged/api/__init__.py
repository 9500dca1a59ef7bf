"""The HTTP side of the daemon: OpenAI routes, feedback, control, the web page, and the server that carries them.

`app.build_app` makes the ASGI application from the ports in `ports.py`; `listen` binds sockets and `server.HttpServer`
serves the application on them. Nothing here knows how answers are made or where ratings are kept.
"""
