"""What every Baton process is made of: settings, errors, JSON logs, a gRPC server with a clean end.
No torch, no policy."""
