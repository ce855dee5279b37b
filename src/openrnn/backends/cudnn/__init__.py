"""cuDNN's recurrent networks, called directly."""

from openrnn.backends.cudnn.backend import Cudnn as Cudnn
