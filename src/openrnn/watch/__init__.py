"""What training does inside: gates, gradient norms and speed, written for TensorBoard."""

from openrnn.watch.lightning import WatchCallback as WatchCallback
from openrnn.watch.watching import Watch as Watch
from openrnn.watch.watching import watch as watch
