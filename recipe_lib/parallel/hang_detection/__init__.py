"""One heartbeat ends all ranks of a run that hangs, with a line that names the rank."""
