"""From the modules of `torch.nn` to ours and back, and from the weights of other libraries."""

from openrnn.convert.lightning import ConvertCallback as ConvertCallback
from openrnn.convert.outcome import ConversionRow as ConversionRow
from openrnn.convert.quantize import Quantization as Quantization
from openrnn.convert.quantize import quantize as quantize
from openrnn.convert.swap import Conversion as Conversion
from openrnn.convert.swap import convert as convert
from openrnn.convert.weights import from_weights as from_weights
from openrnn.convert.weights import to_weights as to_weights
