"""The formats of this package; importing this module fills the table."""

from psm.exporting.formats import register_format
from psm.exporting.huggingface import HF
from psm.exporting.library_weights import TIMM, TORCHVISION
from psm.exporting.onnx_format import ONNX
from psm.exporting.safetensors_format import SAFETENSORS
from psm.exporting.torch_export import TORCH_EXPORT
from psm.exporting.torchscript import TORCHSCRIPT

for _format in (ONNX, TORCHSCRIPT, TORCH_EXPORT, TORCHVISION, TIMM, SAFETENSORS, HF):
    register_format(_format)
