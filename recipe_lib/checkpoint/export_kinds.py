"""The forms that a model is exported in for other programs. No torch."""

GGUF_KINDS = ("f16", "bf16", "f32", "q8_0", "q4_k_m")
ADAPTER_KINDS = ("f16", "bf16", "f32")  # of a GGUF file with an adapter alone
QUANTIZED_KINDS = ("int4", "int8")
GROUP_SIZE = 32  # weights of a row that share a scale in int4
