"""Encoders in other formats: ONNX, TorchScript, torch.export, state dicts of other libraries, a Hugging Face folder."""
