"""The HTTP server: an API process, preprocess workers and an engine process.

The API process holds the routes and the event loop and loads no torch; the workers turn request
bodies into prepared requests; the engine process runs them. ``run.serve`` puts them together.
"""
