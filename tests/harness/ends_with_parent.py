"""Imported first by a server that forks engines: it ends with its parent, also while it imports SGLang for a minute."""

import signal

from ampd.child_process import end_with_parent

end_with_parent(signal.SIGKILL)
