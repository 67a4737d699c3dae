"""What the processes of one JAX program do together. Not for users."""

from jax_te._processes.first import is_first
from jax_te._processes.gather import attempt, check_same, checksum, gather_texts
from jax_te._processes.heartbeats import HEARTBEAT_FOLDER, Heartbeats, LinkedFolderError, SameNumberError, shortened
from jax_te._processes.meeting import Meetings
from jax_te._processes.threads import in_thread
