"""Parts of every Baton process: settings, errors, JSON logs, a gRPC server with a clean end.
No torch, no policy."""

import os

# gRPC's own log lines are no JSON, and what matters of them reaches us as errors. It reads this
# when it is first imported, so it is set before any module of ours can do that.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
