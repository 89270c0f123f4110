"""gRPC services on one Unix socket: translation only."""
