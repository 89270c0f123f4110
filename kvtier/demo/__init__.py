"""What the demo, the end-to-end tests and the benchmarks share: a model, supervised processes, an engine.

Nothing here is imported by the daemon, the client or a connector.
"""
