"""torchao's fake quantizer for FP8 loses gradients; run with torch and torchao alone."""

import torch
import torchao
from torchao.quantization import PerRow
from torchao.quantization.qat import FakeQuantizerBase, Float8FakeQuantizeConfig

print(f"torch {torch.__version__}, torchao {torchao.__version__}")
torch.manual_seed(0)
quantizer = FakeQuantizerBase.from_config(Float8FakeQuantizeConfig(torch.float8_e4m3fn, PerRow()))
weight = torch.randn(64, 64, requires_grad=True)
for size in (1.0, 1e-2, 1e-4):
    gradient = torch.randn(64, 64) * size
    (found,) = torch.autograd.grad(quantizer(weight), weight, gradient)
    zeros, off = (
        float((found == 0).float().mean()),
        float((found - gradient).norm() / gradient.norm()),
    )
    print(
        f"gradients of about {size:g}: {zeros:.1%} of them zero, off by {off:.0%} from passing"
        " straight through"
    )
