"""From the modules of `torch.nn` to ours and back."""

from openrnn.convert.swap import Conversion as Conversion
from openrnn.convert.swap import ConversionRow as ConversionRow
from openrnn.convert.swap import convert as convert
